"""A TCP connection whose two ends have proved that they share a key, and on which every message is authenticated.

The handshake:

1. The end that accepts the connection sends a greeting and a nonce.
2. The end that opened it sends the same greeting, its rank, a nonce, and a digest of both nonces and the rank under the
   key.
3. The first answers with a digest of its own, or with a refusal. It closes connections that are silent, late or wrong.

Both make the key of this connection from the nonces. Each message is then sent with its length and a digest under that
key, which also counts the messages: none can be forged, repeated or left out. Nothing is encrypted.
"""

import contextlib
import hashlib
import hmac
import json
import math
import os
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

GREETING = b"cos598d\x03"
NONCE_BYTES, DIGEST_BYTES = 16, 32
ACCEPTED, REFUSED = b"Y", b"N"
FIRST_BYTES, READ_BYTES = 1 << 12, 1 << 18  # a waiting thread has a buffer of the first size, and later of the second
PENDING_SECONDS = 10.0  # a rank identifies itself within milliseconds; on a busy host, within seconds
MOST_PENDING = 64  # simultaneous connections that are not members yet, in addition to the expected ranks
PAUSE_SECONDS = 0.05  # between two accepted connections, once no rank is expected any more
_LENGTHS = struct.Struct(">II")  # of a message, and of its JSON
_COUNT = struct.Struct(">Q")
_HELLO = struct.Struct(f">{len(GREETING)}si{NONCE_BYTES}s{DIGEST_BYTES}s")

Message = tuple[Any, bytes]


class ProtocolError(OSError):
    """The other end is not a rank of this run, or what it sent is not a message."""


class AuthenticationError(ProtocolError):
    """The other end uses our protocol, but has another key."""


def make_key(secret: bytes, *words: str) -> bytes:
    """The key (32 bytes) that holders of `secret`, which may be empty, use for the purpose `words`."""
    key = hashlib.sha256(b"cos598d" + secret).digest()
    for word in words:
        key = digest(key, word.encode())
    return key


def digest(key: bytes, *parts: bytes) -> bytes:
    """The HMAC-SHA256 of the `parts` under `key`."""
    return hmac.digest(key, b"".join(parts), "sha256")


class Connection:
    """One end of an authenticated connection to `rank`. One receiver and one sender may use it at a time.

    A message is JSON and bytes. `session` is the connection's key. `accepted`: whether this end accepted the
    connection. `largest`: the most bytes in a message from the other end. An acceptor sets which of its keys the other
    end has proved (`key`, from 0), and until when it may stay (`deadline`).
    """

    def __init__(self, line: socket.socket, rank: int, session: bytes, accepted: bool, largest: int, key: int = 0):
        self.socket, self.rank, self.largest, self.key = line, rank, largest, key
        self.deadline = math.inf
        mine, other = (b"accepted", b"connected") if accepted else (b"connected", b"accepted")
        self._mine, self._other = digest(session, mine), digest(session, other)
        self._sent = self._received = 0
        self._data = bytearray()
        self._messages: deque[Message] = deque()

    def pack(self, words: Any, data: bytes = b"") -> bytes:
        """The frame of the next message: `words`, which become JSON, and `data`."""
        text = json.dumps(words).encode()
        payload = b"".join((_LENGTHS.pack(len(text) + len(data), len(text)), text, data))
        proof = digest(self._mine, _COUNT.pack(self._sent), payload)
        self._sent += 1
        return payload + proof

    def unpack(self, data: bytes) -> list[Message]:
        """The messages that `data` completes.

        Raises ProtocolError for a message that is too long, not from the other end or not JSON.
        """
        self._data += data
        messages = []
        while len(self._data) >= _LENGTHS.size:
            length, of_json = _LENGTHS.unpack_from(self._data)
            if length > self.largest:
                raise ProtocolError(f"a message of {length} bytes, of at most {self.largest}")
            end = _LENGTHS.size + length
            if len(self._data) < end + DIGEST_BYTES:
                break
            payload, proof = bytes(self._data[:end]), bytes(self._data[end : end + DIGEST_BYTES])
            if not hmac.compare_digest(proof, digest(self._other, _COUNT.pack(self._received), payload)):
                raise ProtocolError("a message that is not the other end's")
            self._received += 1
            del self._data[: end + DIGEST_BYTES]
            text = payload[_LENGTHS.size : _LENGTHS.size + of_json]
            try:
                messages.append((json.loads(text), payload[_LENGTHS.size + of_json :]))
            except (ValueError, RecursionError):
                raise ProtocolError("a message that is not JSON") from None
        return messages

    def send(self, words: Any, data: bytes = b"") -> None:
        """Send a message. Raises OSError if the other end is gone."""
        self.socket.sendall(self.pack(words, data))

    def send_now(self, words: Any) -> None:
        """Send a message without waiting for the other end to read. A thread sends what does not fit a full buffer."""
        frame = self.pack(words)
        sent = self.socket.send(frame, socket.MSG_DONTWAIT)
        if sent < len(frame):
            threading.Thread(target=_send_rest, args=(self.socket, frame[sent:]), name="verdict", daemon=True).start()

    def receive(self, deadline: float = math.inf) -> Message:
        """The next message. Raises TimeoutError at `deadline` (monotonic clock), and OSError at the stream's end."""
        while not self._messages:
            most = READ_BYTES if self._data else FIRST_BYTES
            self._messages.extend(self.unpack(_read(self.socket, most, deadline)))
        return self._messages.popleft()

    def close(self) -> None:
        """End the connection, also for a thread that waits for a message on it."""
        hang_up(self.socket)
        self.socket.close()


def _send_rest(line: socket.socket, rest: bytes) -> None:
    with contextlib.suppress(OSError):
        line.sendall(rest)


def connect(address: tuple[str, int], key: bytes, rank: int, seconds: float, largest: int) -> Connection:
    """Connect to `address` as `rank`.

    Raises AuthenticationError if the other end has another key, ProtocolError if it does not use our protocol or takes
    longer than `seconds`, and OSError if nothing answers.
    """
    line, deadline = socket.create_connection(address, timeout=min(seconds, 5.0)), time.monotonic() + seconds
    try:
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if _read_all(line, len(GREETING), deadline) != GREETING:
            raise ProtocolError("not our greeting")
        theirs, mine = _read_all(line, NONCE_BYTES, deadline), os.urandom(NONCE_BYTES)
        line.sendall(_HELLO.pack(GREETING, rank, mine, _proof(key, b"connected", theirs, mine, rank)))
        answer = _read_all(line, 1 + DIGEST_BYTES, deadline)
        expected = _proof(key, b"accepted", theirs, mine, rank)
        if answer[:1] == REFUSED or not hmac.compare_digest(answer[1:], expected):
            raise AuthenticationError("another key")
        line.settimeout(None)
        return Connection(line, rank, _proof(key, b"session", theirs, mine, rank), accepted=False, largest=largest)
    except TimeoutError:
        line.close()
        raise ProtocolError("it says nothing") from None
    except BaseException:
        line.close()
        raise


class Acceptor:
    """Accepts connections at `listener` in a thread of its own, until it is closed.

    Each connection has a thread that greets it, and calls `serve` once it has proved one of the `keys`. It is dropped
    after PENDING_SECONDS, or when too many others come, unless it has been `settled`. `refused` counts those with
    another key. While ranks are `expected`, it accepts without pauses.
    """

    def __init__(
        self, listener: socket.socket, key: bytes, largest: int, expected: int, serve: Callable[[Connection], None]
    ):
        self.keys: tuple[bytes, ...] = (key,)
        self.refused, self.expected = 0, expected
        self._listener, self._largest, self._serve = listener, largest, serve
        self._lock, self._is_closed = threading.Lock(), False
        self._pending: dict[socket.socket, None] = {}  # the oldest first
        listener.settimeout(1.0)  # on some systems, shutting it down does not wake its thread
        self._thread = threading.Thread(target=self._accept, name="acceptor", daemon=True)

    def start(self) -> None:
        """Start to accept."""
        self._thread.start()

    def settle(self, connection: Connection) -> None:
        """Keep a connection."""
        connection.deadline = math.inf
        self._forget(connection.socket)

    def close(self) -> None:
        """Stop listening, and drop every connection that has not been settled."""
        self._is_closed = True
        hang_up(self._listener)
        self._thread.join(2)
        self._listener.close()
        self._drop_to(0)

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                line, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:  # it ended already, or no descriptors are left: the next try would fail at once
                self._drop_to(len(self._pending) - 1)
                time.sleep(PAUSE_SECONDS)
                continue
            with self._lock:
                self._pending[line] = None
            self._drop_to(MOST_PENDING + max(self.expected, 0))
            try:
                threading.Thread(target=self._greet, args=(line,), name="connection", daemon=True).start()
            except RuntimeError:  # this process may not start more threads
                self._forget(line)
                line.close()
            if self.expected <= 0:  # strangers, or surplus ranks, must not take this rank's time
                time.sleep(PAUSE_SECONDS)

    def _forget(self, line: socket.socket) -> None:
        with self._lock:
            self._pending.pop(line, None)

    def _drop_to(self, most: int) -> None:
        with self._lock:
            while self._pending and len(self._pending) > most:
                oldest = next(iter(self._pending))
                del self._pending[oldest]
                hang_up(oldest)  # its thread closes it

    def _greet(self, line: socket.socket) -> None:
        try:
            connection = self._admit(line, time.monotonic() + PENDING_SECONDS)
        except OSError as error:
            self.refused += isinstance(error, AuthenticationError)
            self._forget(line)
            line.close()
            return
        self._serve(connection)

    def _admit(self, line: socket.socket, deadline: float) -> Connection:
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        theirs = os.urandom(NONCE_BYTES)
        line.sendall(GREETING + theirs)
        said = b""
        while len(said) < _HELLO.size:
            said += _read(line, _HELLO.size + 1 - len(said), deadline)
            if len(said) > _HELLO.size or not GREETING.startswith(said[: len(GREETING)]):
                raise ProtocolError("speaking out of turn, or not speaking our protocol")
        _, rank, mine, proof = _HELLO.unpack(said)
        keys = self.keys
        known = [hmac.compare_digest(proof, _proof(key, b"connected", theirs, mine, rank)) for key in keys]
        if rank < 0 or not any(known):
            line.sendall(REFUSED + bytes(DIGEST_BYTES))
            raise AuthenticationError("another key")
        place = known.index(True)
        line.sendall(ACCEPTED + _proof(keys[place], b"accepted", theirs, mine, rank))
        session = _proof(keys[place], b"session", theirs, mine, rank)
        connection = Connection(line, rank, session, accepted=True, largest=self._largest, key=place)
        connection.deadline = time.monotonic() + PENDING_SECONDS
        return connection


def hang_up(line: socket.socket) -> None:
    """Shut a socket down, which wakes a thread that waits on it."""
    with contextlib.suppress(OSError):  # it has ended already
        line.shutdown(socket.SHUT_RDWR)


def _read(line: socket.socket, most: int, deadline: float) -> bytes:
    """At least one byte that has arrived. Raises TimeoutError at the deadline, and ConnectionResetError at the end."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    line.settimeout(None if left == math.inf else left)
    data = line.recv(most)
    if not data:
        raise ConnectionResetError("closed")
    return data


def _read_all(line: socket.socket, count: int, deadline: float) -> bytes:
    data = b""
    while len(data) < count:
        data += _read(line, count - len(data), deadline)
    return data


def _proof(key: bytes, what: bytes, accepted: bytes, connected: bytes, rank: int) -> bytes:
    return digest(key, what, b"/", accepted, connected, struct.pack(">i", rank))
