"""The handshake by which the two ends of a new TCP connection prove to each other that they know the run's key.

1. Whoever accepts the connection sends a greeting and a nonce.
2. Whoever opened it sends the same greeting, its rank, a nonce, and a digest of both nonces and the rank under the key.
3. The first answers with a digest of its own, or with a refusal, and closes what is silent, late or wrong.

Both ends make the key of this one connection from the nonces and the run's key; `channel` uses it for their messages.
"""

import hmac
import os
import selectors
import socket
import struct
import time
from dataclasses import dataclass, field
from typing import NamedTuple

from cos598d.world.channel import DIGEST_BYTES, AuthenticationError, Frames, ProtocolError, digest

GREETING = b"cos598d\x02"
NONCE_BYTES = 16
ACCEPTED, REFUSED = b"Y", b"N"
PENDING_SECONDS = 10.0  # a rank says who it is within milliseconds, on a busy host within seconds
MOST_PENDING = 64  # connections at a time that have not said yet who they are, besides the ranks that are expected
PAUSE_SECONDS = 0.05  # between two accepted connections, once no rank is expected any more
_HELLO = struct.Struct(f">{len(GREETING)}si{NONCE_BYTES}s{DIGEST_BYTES}s")


def connect(
    address: tuple[str, int], key: bytes, rank: int, seconds: float, largest: int
) -> tuple[socket.socket, Frames]:
    """Connect to `address` as `rank`; return the socket, which blocks, and the frames of its messages.

    Raises AuthenticationError where the other end has another key, ProtocolError where it does not speak our protocol
    or takes longer than `seconds`, OSError where nothing answers.
    """
    connection = socket.create_connection(address, timeout=min(seconds, 5.0))
    try:
        connection.settimeout(seconds)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if _receive(connection, len(GREETING)) != GREETING:
            raise ProtocolError("not our greeting")
        theirs, mine = _receive(connection, NONCE_BYTES), os.urandom(NONCE_BYTES)
        connection.sendall(_HELLO.pack(GREETING, rank, mine, _proof(key, b"connected", theirs, mine, rank)))
        answer = _receive(connection, 1 + DIGEST_BYTES)
        expected = _proof(key, b"accepted", theirs, mine, rank)
        if answer[:1] == REFUSED or not hmac.compare_digest(answer[1:], expected):
            raise AuthenticationError("another key")
        connection.settimeout(None)
        return connection, Frames(_proof(key, b"session", theirs, mine, rank), accepted=False, largest=largest)
    except BaseException:
        connection.close()
        raise


class Accepted(NamedTuple):
    """A rank that has proved that it knows a key: its socket, which does not block, and the key's place in `keys`."""

    connection: socket.socket
    rank: int
    frames: Frames
    key: int


@dataclass
class _Pending:
    connection: socket.socket
    nonce: bytes
    since: float = field(default_factory=time.monotonic)
    said: bytes = b""


class Acceptor:
    """A listening socket, and the connections to it whose handshake is not complete yet; used in one thread.

    It registers its sockets with `selector`, with itself as their data. Each of `keys` is accepted; `refused` counts
    those who came with another. While ranks are `expected` it accepts without pause.
    """

    def __init__(self, listener: socket.socket, key: bytes, selector: selectors.BaseSelector, largest: int, ranks: int):
        self.keys: tuple[bytes, ...] = (key,)
        self.refused, self.expected = 0, ranks
        self._listener, self._selector, self._largest = listener, selector, largest
        self._pending: dict[object, _Pending] = {}  # by socket, the oldest first
        self._opens_again = 0.0
        listener.setblocking(False)
        selector.register(listener, selectors.EVENT_READ, self)

    def advance(self, ready: object) -> Accepted | None:
        """Go on with the handshake on `ready`, a socket that the selector found readable; return a rank that passed it.

        The returned socket is no longer registered with the selector.
        """
        if ready is self._listener:
            for _ in range(max(1, self.expected)):  # many ranks come at once
                if not self._accept():
                    break
        elif ready in self._pending:
            pending = self._pending[ready]
            try:
                return self._hear(pending)
            except OSError:
                self._drop(pending)
        return None

    def _hear(self, pending: _Pending) -> Accepted | None:
        """Read what has come; the accepted rank, when it has said all. Raises OSError for a connection to drop."""
        connection = pending.connection
        try:
            part = connection.recv(_HELLO.size + 1 - len(pending.said))
        except BlockingIOError:
            return None
        pending.said += part
        if not part or len(pending.said) > _HELLO.size or not GREETING.startswith(pending.said[: len(GREETING)]):
            raise ProtocolError("gone, speaking out of turn, or not speaking our protocol")
        if len(pending.said) < _HELLO.size:
            return None
        _, rank, nonce, proof = _HELLO.unpack(pending.said)
        known = [hmac.compare_digest(proof, _proof(k, b"connected", pending.nonce, nonce, rank)) for k in self.keys]
        if rank < 0 or not any(known):
            self.refused += 1
            connection.send(REFUSED + bytes(DIGEST_BYTES))
            raise AuthenticationError("another key")
        place = known.index(True)
        key = self.keys[place]
        connection.send(ACCEPTED + _proof(key, b"accepted", pending.nonce, nonce, rank))
        self._forget(pending)
        session = _proof(key, b"session", pending.nonce, nonce, rank)
        return Accepted(connection, rank, Frames(session, accepted=True, largest=self._largest), place)

    def sweep(self) -> float:
        """Drop the connections that are late. Call it often; return in how many seconds at most to call it again."""
        now = time.monotonic()
        while self._pending and now - self._oldest().since > PENDING_SECONDS:
            self._drop(self._oldest())
        if self._opens_again and now >= self._opens_again:
            self._opens_again = 0.0
            self._selector.register(self._listener, selectors.EVENT_READ, self)
        return PAUSE_SECONDS if self._opens_again else 1.0

    def close(self) -> None:
        """Stop listening, and drop every connection whose handshake is not complete."""
        for pending in list(self._pending.values()):
            self._drop(pending)
        if not self._opens_again:
            self._selector.unregister(self._listener)
        self._listener.close()

    def _accept(self) -> bool:
        """Accept a connection if one waits; whether another one may be accepted at once."""
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return False
        except OSError:  # it is gone again, or no descriptors are left: the listener would stay readable, in vain
            if self._pending:
                self._drop(self._oldest())
            self._pause()
            return False
        pending = _Pending(connection, os.urandom(NONCE_BYTES))
        self._pending[connection] = pending
        connection.setblocking(False)
        self._selector.register(connection, selectors.EVENT_READ, self)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.send(GREETING + pending.nonce)
        except OSError:
            self._drop(pending)
        if len(self._pending) > MOST_PENDING + max(self.expected, 0):
            self._drop(self._oldest())
        if self.expected <= 0:  # strangers, or surplus ranks: they must not take this rank's time
            self._pause()
            return False
        return True

    def _pause(self) -> None:
        self._opens_again = time.monotonic() + PAUSE_SECONDS
        self._selector.unregister(self._listener)

    def _oldest(self) -> _Pending:
        return next(iter(self._pending.values()))

    def _drop(self, pending: _Pending) -> None:
        self._forget(pending)
        pending.connection.close()

    def _forget(self, pending: _Pending) -> None:
        self._selector.unregister(pending.connection)
        del self._pending[pending.connection]


def _receive(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        try:
            part = connection.recv(count - len(data))
        except TimeoutError:
            raise ProtocolError("it says nothing") from None
        if not part:
            raise ConnectionResetError("closed")
        data += part
    return data


def _proof(key: bytes, what: bytes, accepted: bytes, connected: bytes, rank: int) -> bytes:
    return digest(key, what, b"/", accepted, connected, struct.pack(">i", rank))
