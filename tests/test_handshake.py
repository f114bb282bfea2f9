"""The handshake with rank 0: strangers are dropped whatever they send, and the run goes on; nothing is forged."""

import ast
import contextlib
import errno
import json
import os
import pickle
import re
import selectors
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import psutil
import pytest
from meetings import SECRET, all_exchange, identities, met
from programs import PATIENCE, ROOT, wait_until
from torch.distributed import DistNetworkError, HashStore

from cos598d.errors import UserError
from cos598d.world import channel, endpoint, handshake, rendezvous
from cos598d.world.channel import AuthenticationError, Frames, ProtocolError, make_key
from cos598d.world.handshake import GREETING, NONCE_BYTES, connect
from cos598d.world.meeting import Meeting
from cos598d.world.rendezvous import meet
from cos598d.world.store import StoreClient

pytestmark = pytest.mark.usefixtures("servers")


def is_dropped(line):
    """Whether the other end closes `line`, having said no more than the greeting of the protocol."""
    line.settimeout(PATIENCE)
    said = b""
    try:
        while part := line.recv(4096):
            said += part
    except ConnectionError:
        pass
    return len(said) <= len(GREETING) + NONCE_BYTES + 1 + channel.DIGEST_BYTES


RUBBISH = {
    "a browser": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "a rank of old": (1).to_bytes(4, "big"),
    "torch's store": b"\0" + 0x3C85F7CE.to_bytes(4, "little") + b"\1" + (9).to_bytes(8, "little") + b"objection",
    "a pickle": pickle.dumps(("objection", 1)),
    "bytes": os.urandom(4096),
    "a line without end": b"A" * (1 << 22),
}


def shout(port, words):
    line = socket.create_connection(("127.0.0.1", port))
    with contextlib.suppress(ConnectionError):
        line.sendall(words)
    return line


def meet_says(identity):
    with pytest.raises(UserError) as caught:
        meet(identity, 5, {})
    return str(caught.value)


def test_strangers_before_and_after_the_meeting_are_dropped_and_the_run_goes_on(servers):
    them, lines_of_strangers = identities(3), []

    def come(port):
        lines_of_strangers.extend(shout(port, words) for words in RUBBISH.values())
        lines_of_strangers.append(socket.create_connection(("127.0.0.1", port)))  # says nothing at all

    meetings = met(them, between=come)
    assert all(isinstance(meeting, Meeting) for meeting in meetings), meetings
    come(them[0].master_port)
    assert all_exchange(meetings) == [[{"rank": rank} for rank in range(3)]] * 3
    assert servers[0]._thread.is_alive()
    assert all(is_dropped(line) for line in lines_of_strangers[: len(RUBBISH)])


def test_a_silent_connection_is_dropped_in_time(servers, monkeypatch):
    monkeypatch.setattr(handshake, "PENDING_SECONDS", 0.2)
    them, silent = identities(2), []
    meetings = met(them, between=lambda port: silent.append(socket.create_connection(("127.0.0.1", port))))
    assert all(isinstance(meeting, Meeting) for meeting in meetings), meetings
    assert is_dropped(silent[0])


def test_whoever_has_another_secret_cannot_join_object_or_end_the_run(servers):
    def come(port):
        stranger = replace(identities(2, port, secret=b"another secret, made up")[1])
        with pytest.raises(UserError, match="has another secret or is of another run"):
            meet(stranger, 5, {})
        rendezvous.tell_failure(stranger, "\x1b[31mstop\x1b[0m")

    meetings = met(identities(2), between=come)
    assert all(isinstance(meeting, Meeting) for meeting in meetings), meetings
    assert servers[0].objection == ""


def test_two_runs_of_a_launcher_do_not_mix_at_one_port():
    def come(port):
        with pytest.raises(UserError, match="is of another run"):
            meet(identities(2, port, run_id="17.0")[1], 5, {})

    meetings = met(identities(2, run_id="16.0"), between=come)
    assert all(isinstance(meeting, Meeting) for meeting in meetings), meetings


def test_without_a_secret_nobody_gets_in_once_the_ranks_have_met(servers):
    them = identities(2, secret=b"")
    meetings = met(them)
    assert all(isinstance(meeting, Meeting) for meeting in meetings), meetings
    store = StoreClient(("127.0.0.1", them[0].master_port), make_key(b"", "meeting", ""), 1, 5)
    for attempt in (lambda: store.set("key", "value"), lambda: store.exchange("exchange/1", 0), store.num_keys):
        store.open(5)
        with pytest.raises(DistNetworkError):
            attempt()
    assert (
        meet_says(them[1]) == f"rank 1 was started twice for 127.0.0.1:{them[0].master_port}, where the run has begun."
    )
    assert all_exchange(meetings)[0] == [{"rank": 0}, {"rank": 1}]


def test_without_a_secret_strangers_who_know_the_words_of_the_meeting_do_not_stay(servers, monkeypatch):
    them = identities(2, secret=b"")
    meetings = met(them)
    place, key = ("127.0.0.1", them[0].master_port), make_key(b"", "meeting", "")
    monkeypatch.setattr(handshake, "MOST_PENDING", 8)
    monkeypatch.setattr(handshake, "PAUSE_SECONDS", 0)
    before = len(psutil.Process().net_connections("tcp"))
    strangers = [connect(place, key, 1, 5, 100)[0] for _ in range(12)]
    wait_until(lambda: len(servers[0]._connections) == 2 + 4)  # the ranks', and half of as many as may be pending
    monkeypatch.setattr(handshake, "PENDING_SECONDS", 0.1)
    assert all(is_dropped(line) for line in strangers)
    for line in strangers:
        line.close()
    wait_until(lambda: len(psutil.Process().net_connections("tcp")) <= before + 1)
    assert len(all_exchange(meetings)) == 2


def test_an_acceptor_without_descriptors_left_pauses_and_goes_on():
    class Full:
        def __init__(self, listener):
            self.listener, self.is_full = listener, True

        def __getattr__(self, name):
            return getattr(self.listener, name)

        def accept(self):
            if self.is_full:
                raise OSError(errno.EMFILE, "Too many open files")
            return self.listener.accept()

    with selectors.DefaultSelector() as selector, socket.create_server(("127.0.0.1", 0)) as server:
        full = Full(server)
        acceptor = handshake.Acceptor(full, b"key", selector, 100, 1)
        with socket.create_connection(server.getsockname()) as line:
            ((ready, _),) = selector.select(5)
            acceptor.advance(ready.fileobj)
            assert selector.select(0) == []  # else it would be readable without end
            full.is_full = False
            wait_until(lambda: acceptor.sweep() == 1.0)
            ((ready, _),) = selector.select(5)
            acceptor.advance(ready.fileobj)
            assert line.recv(len(GREETING)) == GREETING
        acceptor.close()


def test_rank_0_serves_itself_while_strangers_queue_at_its_port(servers, monkeypatch):
    """They come as fast as they can once all ranks have come; one is accepted at a time, and rank 0 does not queue."""
    monkeypatch.setattr(handshake, "PAUSE_SECONDS", 3600)
    them, strangers, begin = identities(2), [], rendezvous.AdmissionServer.begin

    def flooded(self, verdict):
        begin(self, verdict)
        strangers.append(socket.create_connection(("127.0.0.1", them[0].master_port)))
        wait_until(lambda: self.acceptor._opens_again)

    monkeypatch.setattr(rendezvous.AdmissionServer, "begin", flooded)
    meetings = met(them, seconds=5)
    assert all(isinstance(meeting, Meeting) for meeting in meetings), meetings
    assert meetings[0].store.local_address == "127.0.0.1"
    assert all_exchange(meetings)[0] == [{"rank": 0}, {"rank": 1}]


@pytest.mark.parametrize("stopped", [KeyboardInterrupt(), UserError("the program that started this worker is gone.")])
def test_when_rank_0_is_stopped_in_the_meeting_those_who_came_hear_it(stopped, servers, monkeypatch):
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


def test_a_rank_of_other_words_cannot_put_escapes_on_a_terminal(servers):
    them = identities(2)
    with ThreadPoolExecutor(2) as pool:
        zero = pool.submit(meet, them[0], 20, {"sync": "ring"})
        one = pool.submit(meet, them[1], 20, {"sync": "\x1b[2J\x1b]0;title\a"})
        for future in (zero, one):
            with pytest.raises(UserError, match="rank 1 was started with --sync") as caught:
                future.result(60)
            assert not re.search(r"[\x00-\x1f]", str(caught.value))


def test_rank_0_listens_at_the_meeting_point_alone(servers):
    them = identities(2)
    assert all(isinstance(meeting, Meeting) for meeting in met(them))
    own = [c.laddr for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN]
    assert [place.ip for place in own if place.port == them[0].master_port] == ["127.0.0.1"]


def test_a_message_that_is_not_the_other_end_s_is_refused_whatever_was_changed():
    session = make_key(b"session")
    message = Frames(session, accepted=True, largest=100).pack(b'["lost", 3]')
    assert Frames(session, accepted=False, largest=100).unpack(message) == [["lost", 3]]
    for at in range(4, len(message)):
        forged = message[:at] + bytes([message[at] ^ 1]) + message[at + 1 :]
        with pytest.raises(ProtocolError):
            Frames(session, accepted=False, largest=100).unpack(forged)
    twice = Frames(session, accepted=False, largest=100)
    twice.unpack(message)
    with pytest.raises(ProtocolError):
        twice.unpack(message)  # said again by somebody who heard it
    with pytest.raises(ProtocolError, match="of at most 100"):
        Frames(session, accepted=False, largest=100).unpack(b"\xff" * 4)


def test_a_program_that_answers_in_rank_0_s_place_is_not_believed():
    """It may repeat everything that it hears; without the secret it proves nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def pretend():
            line, _ = server.accept()
            with line:
                line.sendall(GREETING + bytes(NONCE_BYTES))
                line.recv(4096)
                line.sendall(b"Y" + bytes(channel.DIGEST_BYTES))
                line.recv(4096)

        thread = threading.Thread(target=pretend)
        thread.start()
        with pytest.raises(AuthenticationError):
            connect(server.getsockname(), make_key(SECRET), 1, 5, 100)
        thread.join()


def test_torchrun_s_store_is_believed_only_where_it_proves_the_port():
    identity = identities(2, run_id="9")[0]
    store = HashStore()
    assert endpoint._published_port(identity, store) is None
    for forged in ("7000", json.dumps([7000, "0" * 64]), json.dumps([7000, None]), "[" * 100_000, "\x00"):
        store.set("port", forged)
        assert endpoint._published_port(identity, store) is None
    store.set("port", json.dumps([7000, endpoint._proof(identity, 7000)]))
    assert endpoint._published_port(identity, store) == 7000


def test_nothing_that_could_unpickle_what_came_by_a_socket_is_used():
    """Neither pickle itself nor what torch builds on it: object collectives, and the elastic launcher's rendezvous."""
    modules = ("pickle", "marshal", "shelve", "torch.distributed.elastic", "torch.distributed.launcher")
    calls = ("object_list", "gather_object")
    found = set()
    for path in (ROOT / "cos598d").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [node.attr] if isinstance(node, ast.Attribute) else []
            found.update((path.name, name) for name in names if name.startswith(modules) or name.endswith(calls))
    # The name of an error, of a load that takes weights alone; and a reader of files that knows three names.
    assert found <= {("checkpoint.py", "pickle"), ("cifar.py", "pickle")}
