"""The handshake with rank 0: strangers are dropped whatever they send, nothing can be forged, the run continues."""

import ast
import contextlib
import errno
import json
import re
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import psutil
import pytest
from meetings import SECRET, exchange_works, identities, is_open, met
from programs import PATIENCE, ROOT, wait_until
from test_stranger import rubbish
from torch.distributed import DistNetworkError, HashStore

from cos598d.errors import UserError
from cos598d.world import connection, endpoint, rendezvous
from cos598d.world.connection import (
    DIGEST_BYTES,
    GREETING,
    NONCE_BYTES,
    Acceptor,
    AuthenticationError,
    Connection,
    ProtocolError,
    connect,
    make_key,
)
from cos598d.world.rendezvous import meet
from cos598d.world.store import StoreClient

pytestmark = pytest.mark.usefixtures("servers")

SILENT = b""


def call(port, words=SILENT):
    line = socket.create_connection(("127.0.0.1", port))
    with contextlib.suppress(ConnectionError):
        line.sendall(words)
    return line


def is_dropped(line):
    """Whether the other end closes `line` after no more than the greeting of the protocol."""
    line.settimeout(PATIENCE)
    said = b""
    with contextlib.suppress(ConnectionError):
        while part := line.recv(4096):
            said += part
    return len(said) <= len(GREETING) + NONCE_BYTES + 1 + DIGEST_BYTES


def guest(port, rank=1):
    """A stranger who knows the protocol, at a rendezvous without a secret."""
    return connect(("127.0.0.1", port), make_key(b"", "meeting", ""), rank, 5, 100)


def held():
    """The threads and the sockets of this process."""
    return threading.active_count(), len(psutil.Process().net_connections("tcp"))


def test_strangers_are_dropped_before_and_after_the_meeting(servers, monkeypatch):
    monkeypatch.setattr(connection, "PENDING_SECONDS", 1.0)
    monkeypatch.setattr(connection, "PAUSE_SECONDS", 0.001)
    them, strangers, before = identities(3), [], held()

    def come(port):
        strangers.extend(call(port, words) for words in (*rubbish("executed").values(), *[SILENT] * 100))

    meetings = met(them, between=come)
    come(them[0].master_port)
    assert exchange_works(meetings)
    assert all(is_dropped(line) for line in strangers)
    assert exchange_works(meetings)
    for line in strangers:
        line.close()
    servers[0].stop()
    del meetings
    wait_until(lambda: held() <= before)


def test_a_slow_sender_is_dropped_as_soon_as_a_silent_one(monkeypatch):
    monkeypatch.setattr(connection, "PENDING_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        acceptor = Acceptor(server, b"key", 100, 1, lambda connection: None)
        acceptor.start()
        with call(server.getsockname()[1]) as line, contextlib.suppress(ConnectionError):
            for byte in GREETING + bytes(30):
                line.sendall(bytes([byte]))
                threading.Event().wait(0.1)
            pytest.fail("it is never dropped")
        acceptor.close()


@pytest.mark.parametrize("other", [{"secret": b"another secret, made up"}, {"run_id": "17.0"}])
def test_a_rank_with_another_secret_or_run_cannot_join_or_end_the_run(other, servers):
    def come(port):
        stranger = identities(2, port, **other)[1]
        with pytest.raises(UserError, match="has another secret or belongs to another run"):
            meet(stranger, 5, {})
        rendezvous.tell_failure(stranger, "\x1b[31mstop\x1b[0m")

    met(identities(2), between=come)
    assert servers[0].objection == ""


def test_without_a_secret_nobody_joins_after_the_meeting():
    them = identities(2, secret=b"")
    meetings, port = met(them), them[0].master_port
    store = StoreClient(("127.0.0.1", port), make_key(b"", "meeting", ""), 1, 5)
    for attempt in (lambda: store.set("key", "value"), store.num_keys):
        store.open(5)
        with pytest.raises(DistNetworkError):
            attempt()
    with pytest.raises(UserError, match=f"^rank 1 was started twice for 127.0.0.1:{port}.* Give each run a"):
        meet(them[1], 5, {})
    assert exchange_works(meetings)


def test_without_a_secret_strangers_who_know_the_protocol_are_limited_and_dropped(servers, monkeypatch):
    monkeypatch.setattr(connection, "MOST_PENDING", 8)
    monkeypatch.setattr(connection, "PAUSE_SECONDS", 0)
    monkeypatch.setattr(connection, "PENDING_SECONDS", 3.0)
    them = identities(2, secret=b"")
    meetings = met(them)
    strangers = [guest(them[0].master_port) for _ in range(20)]
    wait_until(lambda: len(servers[0]._connections) <= 1 + 8)  # rank 1's, and of theirs the latest
    assert all(is_dropped(stranger.socket) for stranger in strangers)
    wait_until(lambda: len(servers[0]._connections) == 1)
    assert exchange_works(meetings)


def test_an_acceptor_without_free_descriptors_pauses_and_continues():
    errors = [OSError(errno.EMFILE, "Too many open files")] * 3

    def accept():
        if errors:
            raise errors.pop()
        return server.accept()

    with socket.create_server(("127.0.0.1", 0)) as server:
        full = Mock(wraps=server, **{"accept.side_effect": accept})
        acceptor = Acceptor(full, b"key", 100, 1, lambda connection: None)
        with call(server.getsockname()[1]) as line:
            acceptor.start()
            assert line.recv(len(GREETING)) == GREETING
        assert not errors
        acceptor.close()
        assert not acceptor._thread.is_alive()


@pytest.mark.parametrize(
    "stopped", [KeyboardInterrupt(), UserError("the program that started this worker has ended. Start the run again.")]
)
def test_ranks_in_the_meeting_learn_that_rank_0_stopped(stopped, servers, monkeypatch):
    them = identities(3)

    def stop():
        if servers and 1 in servers[0]._arrived:
            raise stopped

    monkeypatch.setattr(rendezvous, "check_launcher", stop)
    with ThreadPoolExecutor(2) as pool:
        zero, one = (pool.submit(meet, identity, 20, {}) for identity in them[:2])
        with pytest.raises(UserError, match="rank 0 left before the run began: (it was|the program that)"):
            one.result(30)
        assert zero.exception(30) is stopped


@pytest.mark.parametrize("comes_again", [True, False])
def test_a_rank_that_dies_in_the_meeting_may_return_or_is_lost(comes_again, servers):
    them = identities(4, secret=b"")
    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(meet, them[0], 20, {})]
        wait_until(lambda: is_open(them[0].master_port))
        dies = guest(them[0].master_port, rank=2)
        dies.send(["arrive", {"host": "", "network": "", "world_size": 4, "facts": {}}])
        wait_until(lambda: 2 in servers[0]._arrived)
        dies.close()
        wait_until(lambda: servers[0]._lost)
        if comes_again:
            futures.append(pool.submit(meet, them[2], 20, {}))
            wait_until(lambda: not servers[0]._lost)
        futures += [pool.submit(meet, them[rank], 20, {}) for rank in (1, 3)]
        if comes_again:
            assert all(future.result(PATIENCE) for future in futures)
        else:
            for future in futures:
                with pytest.raises(UserError, match="^lost connection to rank 2"):
                    future.result(PATIENCE)


def test_a_second_run_at_a_port_is_refused_and_the_first_continues():
    them = identities(2)

    def come(port):
        with pytest.raises(UserError, match=f"port {port} on this host is taken by another program"):
            meet(them[0], 5, {})

    assert exchange_works(met(them, between=come))


def test_a_rank_s_flags_cannot_send_escapes_to_a_terminal():
    them = identities(2)
    with ThreadPoolExecutor(2) as pool:
        zero = pool.submit(meet, them[0], 20, {"sync": "ring"})
        one = pool.submit(meet, them[1], 20, {"sync": "\x1b[2J\x1b]0;title\a"})
        for future in (zero, one):
            with pytest.raises(UserError, match="rank 1 was started with --sync") as caught:
                future.result(60)
            assert not re.search(r"[\x00-\x1f]", str(caught.value))


def test_rank_0_listens_only_at_the_meeting_point():
    them = identities(2)
    met(them)
    own = [c.laddr for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN]
    assert [place.ip for place in own if place.port == them[0].master_port] == ["127.0.0.1"]


def test_changed_replayed_and_reflected_messages_are_refused():
    def end(accepted, largest=100):
        return Connection(None, 1, make_key(b"session"), accepted, largest)

    message = end(True).pack(["lost", 3], b"data")
    assert end(False).unpack(message) == [(["lost", 3], b"data")]
    for at in range(len(message)):
        forged = message[:at] + bytes([message[at] ^ 1]) + message[at + 1 :]
        with contextlib.suppress(ProtocolError):  # or it waits for a longer one
            assert end(False).unpack(forged) == []
    twice, swapped = end(False), end(True)
    twice.unpack(message)
    for other, sent in ((twice, message), (swapped, message)):  # a replay, and a reflection
        with pytest.raises(ProtocolError):
            other.unpack(sent)
    with pytest.raises(ProtocolError, match="of at most 100"):
        end(False).unpack(b"\xff" * 8)


def test_a_replay_of_a_rank_s_messages_is_refused(servers, monkeypatch):
    class Recorder(socket.socket):
        def sendall(self, data):
            said.append(data)
            super().sendall(data)

    said, create = [], socket.create_connection
    recorded = lambda *words, **more: Recorder(fileno=create(*words, **more).detach())  # noqa: E731
    monkeypatch.setattr(connection.socket, "create_connection", recorded)
    meetings = met(identities(2))
    meetings[1].store.set("key", "value")
    assert len(said) == 3  # hello, arrive and set
    meetings[1].store.delete_key("key")
    for words in (b"".join(said), said[2]):
        assert is_dropped(call(servers[0]._identity.master_port, words))
    meetings[1].store._free[0].socket.sendall(said[2])  # even on the connection itself
    with pytest.raises(DistNetworkError):
        meetings[1].store.num_keys()
    assert meetings[0].store.num_keys() == 0


def test_a_program_that_answers_in_place_of_rank_0_is_refused():
    """It may repeat all that it receives. Without the secret it proves nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def pretend():
            line, _ = server.accept()
            with line:
                line.sendall(GREETING + bytes(NONCE_BYTES))
                line.recv(4096)
                line.sendall(b"Y" + bytes(DIGEST_BYTES))
                line.recv(4096)

        thread = threading.Thread(target=pretend)
        thread.start()
        with pytest.raises(AuthenticationError):
            connect(server.getsockname(), make_key(SECRET), 1, 5, 100)
        thread.join()


def test_a_port_in_torchrun_s_store_needs_a_proof():
    identity = identities(2, run_id="9")[0]
    store = HashStore()
    assert endpoint._published_port(identity, store) is None
    for forged in ("7000", json.dumps([7000, "0" * 64]), json.dumps([7000, None]), "[" * 100_000, "\x00"):
        store.set("port", forged)
        assert endpoint._published_port(identity, store) is None
    store.set("port", json.dumps([7000, endpoint._proof(identity, 7000)]))
    assert endpoint._published_port(identity, store) == 7000


def test_no_code_can_unpickle_data_from_a_socket():
    """Neither pickle nor what torch builds on it: object collectives, and the elastic launcher's rendezvous."""
    modules = ("pickle", "marshal", "shelve", "torch.distributed.elastic", "torch.distributed.launcher")
    calls = ("object_list", "gather_object")
    found = set()
    for path in (ROOT / "cos598d").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [node.attr] if isinstance(node, ast.Attribute) else []
            found.update((path.name, name) for name in names if name.startswith(modules) or name.endswith(calls))
    # Names of errors, a load of weights, a start; and a reader of files that allows three names.
    assert found <= {("checkpoint.py", "pickle"), ("fixture.py", "pickle"), ("cifar10.py", "pickle")}
