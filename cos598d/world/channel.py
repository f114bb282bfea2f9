"""Authenticated messages on a connection whose two ends share a key; `handshake` makes the key of one connection.

Each message is JSON in a frame: its length, itself, and a digest under the key that also counts the messages, so that
none can be forged, repeated or left out. Every message has a largest size. Nothing is encrypted: whoever can read the
network can read the messages, but cannot write any.
"""

import base64
import hashlib
import hmac
import json
import struct
from collections.abc import Sequence
from typing import Any

DIGEST_BYTES = 32
READ_BYTES = 1 << 18
_LENGTH = struct.Struct(">I")
_COUNT = struct.Struct(">Q")


class ProtocolError(OSError):
    """The other end is not a rank of this run, or what it sent is not a message."""


class AuthenticationError(ProtocolError):
    """The other end speaks our protocol, but has another key."""


def make_key(secret: bytes, *words: str) -> bytes:
    """The key (32 bytes) that those who share `secret`, which may be empty, use for what the `words` say."""
    key = hashlib.sha256(b"cos598d" + secret).digest()
    for word in words:
        key = digest(key, word.encode())
    return key


def digest(key: bytes, *parts: bytes) -> bytes:
    """The HMAC-SHA256 of the `parts` under `key`."""
    return hmac.digest(key, b"".join(parts), "sha256")


def to_text(value: bytes) -> str:
    """Bytes as they travel in a message."""
    return base64.b64encode(value).decode()


def from_text(text: str) -> bytes:
    """Bytes that have travelled. Raises ValueError for what is none."""
    return base64.b64decode(text, validate=True)


def numbered(values: Sequence[str]) -> tuple[list[str], list[int]]:
    """The distinct values, in the order in which they first stand, and of each value its place among them.

    So what many ranks say alike travels once.
    """
    places: dict[str, int] = {}
    of_each = [places.setdefault(value, len(places)) for value in values]
    return list(places), of_each


class Frames:
    """Packs this end's messages and unpacks the other's, of at most `largest` bytes.

    `session` is the connection's key, `accepted` whether this end accepted the connection (or else opened it).
    """

    def __init__(self, session: bytes, accepted: bool, largest: int):
        mine, other = (b"accepted", b"connected") if accepted else (b"connected", b"accepted")
        self._mine, self._other, self.largest = digest(session, mine), digest(session, other), largest
        self._sent = self._received = 0
        self._data = bytearray()

    def pack(self, payload: bytes) -> bytes:
        """The frame of one message, given as JSON in bytes."""
        proof = digest(self._mine, _COUNT.pack(self._sent), payload)
        self._sent += 1
        return b"".join((_LENGTH.pack(len(payload)), payload, proof))

    def unpack(self, data: bytes) -> list[Any]:
        """The messages that `data` completes.

        Raises ProtocolError for a message that is too long, not from the other end or not JSON.
        """
        self._data += data
        messages = []
        while len(self._data) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._data)
            if length > self.largest:
                raise ProtocolError(f"a message of {length} bytes, of at most {self.largest}")
            end = _LENGTH.size + length + DIGEST_BYTES
            if len(self._data) < end:
                break
            payload = bytes(self._data[_LENGTH.size : end - DIGEST_BYTES])
            proof = digest(self._other, _COUNT.pack(self._received), payload)
            if not hmac.compare_digest(proof, self._data[end - DIGEST_BYTES : end]):
                raise ProtocolError("a message that is not the other end's")
            self._received += 1
            del self._data[:end]
            try:
                messages.append(json.loads(payload))
            except (ValueError, RecursionError):
                raise ProtocolError("a message that is not JSON") from None
        return messages
