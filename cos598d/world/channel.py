"""A TCP connection whose two ends have proved to each other that they know the run's key, as every message does again.

1. Whoever accepts a connection sends a greeting and a nonce.
2. Whoever connected sends the same greeting, its rank, a nonce and a digest of both nonces and the rank under the key.
3. The first answers with a digest of its own, or with a refusal, and drops what is silent, late or wrong.

From the nonces and the key both make the key of this one connection. Each message is JSON, goes in a frame of its
length, itself and a digest that counts the messages, and has a largest size. Nothing is encrypted: who can read the
network can read the messages, but not write any.
"""

import contextlib
import hashlib
import hmac
import json
import os
import selectors
import socket
import struct
import time
from dataclasses import dataclass, field
from typing import Any

GREETING = b"cos598d\x02"
NONCE_BYTES, DIGEST_BYTES = 16, 32
ACCEPTED, REFUSED = b"Y", b"N"
GUEST_SECONDS = 10.0  # who has connected says in milliseconds who it is, on a busy host in seconds
GUESTS = 64  # connections at a time that have not said yet who they are, more than the ranks to come
PAUSE_SECONDS = 0.05  # from one stranger to the next, once nobody is expected any more
_HELLO = struct.Struct(f">{len(GREETING)}si{NONCE_BYTES}s{DIGEST_BYTES}s")
_LENGTH = struct.Struct(">I")
_COUNT = struct.Struct(">Q")


class Stranger(OSError):
    """The other end is none of this run, or what it sent is no message."""


class Refusal(Stranger):
    """The other end speaks as we do, but has another key."""


def make_key(secret: bytes, *words: str) -> bytes:
    """The key (32 bytes) for what the `words` say, of those who share `secret`, which may be empty."""
    key = hashlib.sha256(b"cos598d" + secret).digest()
    for word in words:
        key = _digest(key, word.encode())
    return key


class Frames:
    """Packs this end's messages and unpacks the other's, of at most `largest` bytes; `session` keys the connection."""

    def __init__(self, session: bytes, accepted: bool, largest: int):
        mine, other = (b"accepted", b"connected") if accepted else (b"connected", b"accepted")
        self._mine, self._other, self.largest = _digest(session, mine), _digest(session, other), largest
        self._sent = self._received = 0
        self._data = bytearray()

    def pack(self, payload: bytes) -> bytes:
        """The frame of one message, given as JSON in bytes."""
        digest = _digest(self._mine, _COUNT.pack(self._sent), payload)
        self._sent += 1
        return b"".join((_LENGTH.pack(len(payload)), payload, digest))

    def unpack(self, data: bytes) -> list[Any]:
        """The messages that `data` completes. Raises Stranger for one too long, not the other end's, or no JSON."""
        self._data += data
        messages = []
        while len(self._data) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._data)
            if length > self.largest:
                raise Stranger(f"a message of {length} bytes, of at most {self.largest}")
            end = _LENGTH.size + length + DIGEST_BYTES
            if len(self._data) < end:
                break
            payload = bytes(self._data[_LENGTH.size : end - DIGEST_BYTES])
            digest = _digest(self._other, _COUNT.pack(self._received), payload)
            if not hmac.compare_digest(digest, self._data[end - DIGEST_BYTES : end]):
                raise Stranger("a message that is not the other end's")
            self._received += 1
            del self._data[:end]
            try:
                messages.append(json.loads(payload))
            except (ValueError, RecursionError):
                raise Stranger("a message that is no JSON") from None
        return messages


def connect(address: tuple[str, int], key: bytes, rank: int, seconds: float, largest: int) -> tuple[Any, Frames]:
    """Connect to `address` as `rank`; return the socket, which blocks, and its frames.

    Raises Refusal where the other end has another key, Stranger where it does not speak as we do or not within
    `seconds`, OSError where nothing answers.
    """
    line = socket.create_connection(address, timeout=min(seconds, 5.0))
    try:
        line.settimeout(seconds)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        greeting = _receive(line, len(GREETING))
        if greeting != GREETING:
            raise Stranger("no greeting of ours")
        theirs, mine = _receive(line, NONCE_BYTES), os.urandom(NONCE_BYTES)
        line.sendall(_HELLO.pack(GREETING, rank, mine, _proof(key, b"connected", theirs, mine, rank)))
        answer = _receive(line, 1 + DIGEST_BYTES)
        if answer[:1] == REFUSED or not hmac.compare_digest(answer[1:], _proof(key, b"accepted", theirs, mine, rank)):
            raise Refusal("another key")
        line.settimeout(None)
        return line, Frames(_proof(key, b"session", theirs, mine, rank), accepted=False, largest=largest)
    except BaseException:
        line.close()
        raise


@dataclass
class _Guest:
    nonce: bytes
    since: float = field(default_factory=time.monotonic)
    said: bytes = b""


class Door:
    """A listening socket, and those who came and have not proved yet that they are of this run; used in one thread.

    It registers its sockets with `selector`, itself as their data. Any of `keys` opens it; `refused` counts those who
    came with another. While ranks are `expected` it is open without pause.
    """

    def __init__(self, listener: socket.socket, key: bytes, selector: selectors.BaseSelector, largest: int, ranks: int):
        self.keys: tuple[bytes, ...] = (key,)
        self.refused, self.expected = 0, ranks
        self._listener, self._selector, self._largest = listener, selector, largest
        self._guests: dict[socket.socket, _Guest] = {}
        self._opens_again = 0.0
        listener.setblocking(False)
        selector.register(listener, selectors.EVENT_READ, self)

    def admit(self, line: socket.socket) -> tuple[socket.socket, int, Frames, int] | None:
        """Hear what `line`, which the selector found readable, has to say; return a rank that has proved itself.

        Its socket, which does not block and is out of the selector, its rank, its frames, and the key's place in keys.
        """
        if line is self._listener:
            self._accept()
            return None
        guest = self._guests.get(line)
        if guest is None:
            return None
        try:
            guest.said += line.recv(_HELLO.size + 1 - len(guest.said)) or b"\0" * (_HELLO.size + 1)
        except BlockingIOError:
            return None
        except OSError:
            return self._drop(line)
        if len(guest.said) > _HELLO.size or not GREETING.startswith(guest.said[: len(GREETING)]):
            return self._drop(line)  # it is gone, talks before it was answered, or does not speak as we do
        if len(guest.said) < _HELLO.size:
            return None
        _, rank, nonce, proof = _HELLO.unpack(guest.said)
        known = [hmac.compare_digest(proof, _proof(k, b"connected", guest.nonce, nonce, rank)) for k in self.keys]
        if rank < 0 or not any(known):
            self.refused += 1
            with contextlib.suppress(OSError):
                line.send(REFUSED + bytes(DIGEST_BYTES))
            return self._drop(line)
        key = self.keys[known.index(True)]
        self._selector.unregister(line)
        del self._guests[line]
        try:
            line.send(ACCEPTED + _proof(key, b"accepted", guest.nonce, nonce, rank))
        except OSError:
            line.close()
            return None
        session = _proof(key, b"session", guest.nonce, nonce, rank)
        return line, rank, Frames(session, accepted=True, largest=self._largest), known.index(True)

    def sweep(self) -> float:
        """Drop who is late. Call it often; return in how many seconds at most to call it again."""
        now = time.monotonic()
        for line, guest in list(self._guests.items()):
            if now - guest.since > GUEST_SECONDS:
                self._drop(line)
        if self._opens_again and now >= self._opens_again:
            self._opens_again = 0.0
            self._selector.register(self._listener, selectors.EVENT_READ, self)
        return PAUSE_SECONDS if self._opens_again else 1.0

    def close(self) -> None:
        """Listen no longer, and drop all who have not proved themselves."""
        for line in list(self._guests):
            self._drop(line)
        if not self._opens_again:
            self._selector.unregister(self._listener)
        self._listener.close()

    def _accept(self) -> None:
        try:
            line, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError:  # it has gone again, or no descriptors are left: it would be readable again at once, in vain
            self._drop_oldest()
            self._pause()
            return
        guest = _Guest(os.urandom(NONCE_BYTES))
        self._guests[line] = guest
        line.setblocking(False)
        self._selector.register(line, selectors.EVENT_READ, self)
        try:
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            line.send(GREETING + guest.nonce)
        except OSError:
            self._drop(line)
        if len(self._guests) > GUESTS + max(self.expected, 0):
            self._drop_oldest()
        if self.expected <= 0:  # strangers, or ranks too many: they shall not take this rank's time
            self._pause()

    def _pause(self) -> None:
        self._opens_again = time.monotonic() + PAUSE_SECONDS
        self._selector.unregister(self._listener)

    def _drop_oldest(self) -> None:
        if self._guests:
            self._drop(min(self._guests, key=lambda line: self._guests[line].since))

    def _drop(self, line: socket.socket) -> None:
        self._selector.unregister(line)
        del self._guests[line]
        line.close()


def _receive(line: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        try:
            part = line.recv(count - len(data))
        except TimeoutError:
            raise Stranger("it says nothing") from None
        if not part:
            raise ConnectionResetError("closed")
        data += part
    return data


def _proof(key: bytes, what: bytes, accepted: bytes, connected: bytes, rank: int) -> bytes:
    return _digest(key, what, b"/", accepted, connected, struct.pack(">i", rank))


def _digest(key: bytes, *parts: bytes) -> bytes:
    return hmac.digest(key, b"".join(parts), "sha256")
