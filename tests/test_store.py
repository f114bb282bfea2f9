"""What rank 0 serves: keys, and exchanges through them, whose traffic hardly depends on how many ranks there are."""

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from meetings import all_at_once, exchange_works, identities, met
from programs import wait_until
from torch.distributed import DistError, HashStore

from cos598d.comm import process_group
from cos598d.errors import UserError
from cos598d.terminal.words import ranks_in_words
from cos598d.world.connection import Connection
from cos598d.world.identity import Identity
from cos598d.world.meeting import Meeting
from cos598d.world.rendezvous import meet
from cos598d.world.server import LARGEST_ARRIVAL
from cos598d.world.store import StoreClient
from cos598d.world.watchdog import Watchdog

pytestmark = pytest.mark.usefixtures("servers")


def test_a_store_of_ours_keeps_what_torch_expects_of_one():
    first, second = (meeting.store for meeting in met(identities(2)))
    first.set("a", b"\x00\xff")
    assert second.get("a") == b"\x00\xff"
    assert [first.add("n", 2), second.add("n", 3)] == [2, 5]
    assert second.get("n") == b"5"
    assert second.check(["a", "n"])
    assert not second.check(["a", "b"])
    assert second.compare_set("a", b"\x00\xff", "new") == b"new"
    assert second.compare_set("a", "other", "newer") == b"new"
    assert second.compare_set("b", "other", "newer") == b"other"
    second.append("a", "est")
    assert second.multi_get(["a", "n"]) == [b"newest", b"5"]
    assert second.num_keys() == 2
    assert second.delete_key("a")
    assert not first.delete_key("a")
    with ThreadPoolExecutor(2) as pool:
        waits = [pool.submit(one.multi_get, ["late", "n"]) for one in (first, second)]
        first.set("late", "here")
        assert [future.result(10) for future in waits] == [[b"here", b"5"]] * 2
    for one in (first, second):
        with pytest.raises(DistError, match=r"Timed out after 0\.1 s waiting for never"):
            one.wait(["never"], timedelta(seconds=0.1))
    first.set("never", "at last")
    assert second.get("never") == b"at last"


def test_a_rank_may_say_much_but_only_once_it_has_met_the_others():
    long = "x" * (LARGEST_ARRIVAL + 1)
    assert all_at_once(met(identities(2)), lambda meeting: meeting.exchange(long)) == [[long, long]] * 2
    them = identities(2, secret=b"")
    with ThreadPoolExecutor(2) as pool:
        zero = pool.submit(meet, them[0], 1, {})
        one = pool.submit(meet, them[1], 1, {"sync": long})
        for future in (zero, one):
            with pytest.raises(UserError, match="rank 0 closed the connection|did not come|lost connection to rank 1"):
                future.result(60)


def meetings_in_memory(size):
    """As the worlds of `check` meet, through a store of torch's."""
    kept = HashStore()
    return [Meeting(Identity(rank, size), kept, ["here"] * size, seconds=20) for rank in range(size)]


@pytest.mark.parametrize("make", [meetings_in_memory, lambda size: met(identities(size))])
def test_an_exchange_gives_all_to_all_and_what_only_rank_0_needs_goes_only_there(make):
    meetings = make(12)
    values = [{"rank": rank // 5, "of": [1.0, None, "x"]} for rank in range(12)]
    for _ in range(3):
        assert all_at_once(meetings, lambda meeting: meeting.exchange(values[meeting.identity.rank])) == [values] * 12
        assert exchange_works(meetings)
        found = all_at_once(meetings, lambda meeting: meeting.collect(meeting.identity.rank))
        assert found == [list(range(12)), *[None] * 11]
    if isinstance(meetings[0].store, StoreClient):
        assert meetings[0].store.num_keys() == 0, "what was exchanged is not kept"


@pytest.mark.parametrize(("come", "words"), [([0, 1], "rank 2"), ([1, 2], "rank 0"), ([1], "ranks 0, 2")])
def test_ranks_that_give_nothing_are_named(come, words):
    meetings = met(identities(3), seconds=20)
    for meeting in meetings:
        meeting.store.seconds = meeting.seconds = 0.5
    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(meetings[rank].exchange, 1) for rank in come]:
            with pytest.raises(UserError, match=f"no answer from {words} within 0.5 s"):
                future.result(30)


def test_who_waits_while_the_table_closes_is_not_told_that_time_is_up(servers):
    """The table ends its waits before the server hangs up."""
    meetings = met(identities(3))
    with ThreadPoolExecutor(2) as pool:
        waits = [pool.submit(meetings[rank].exchange, 1) for rank in (0, 2)]
        wait_until(lambda: {"exchange/1/1", "exchange/1/all"} <= servers[0].table._came.keys())
        servers[0].table.close()
        for one in waits:
            with pytest.raises(DistError, match="Connection closed"):
                one.result(20)


def test_when_rank_0_is_gone_the_others_learn_it_also_while_they_wait(servers):
    meetings = met(identities(3))
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(meetings[2].exchange, 1)
        wait_until(lambda: meetings[0].store.check(["exchange/1/2"]))
        servers[0].stop()
        for attempt in (lambda: meetings[1].exchange(1), lambda: waits.result(20)):
            with pytest.raises(DistError, match="Connection closed"):
                attempt()


def test_of_many_ranks_the_first_are_named():
    assert ranks_in_words([3]) == "rank 3"
    assert ranks_in_words([1, 3]) == "ranks 1, 3"
    assert ranks_in_words(list(range(100))).endswith("18, 19 and 80 more")


def test_threads_that_use_the_store_at_once_share_what_connections_there_are(servers):
    one = met(identities(2))[1].store
    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(one.get, f"late{k}") for k in range(3)]
        wait_until(lambda: len(servers[0]._connections) == 3)
        for k in range(3):
            one.set(f"late{k}", str(k))
        assert [future.result(20) for future in waiting] == [b"0", b"1", b"2"]
    for _ in range(20):
        one.check(["late0"])
    assert len(servers[0]._connections) <= 4


@pytest.fixture
def traffic(monkeypatch):
    """Requests of each rank by kind, and bytes of the answers to it, from now on."""
    asked, heard, lock = Counter(), Counter(), threading.Lock()
    request, send = StoreClient.request, Connection.send

    def counted_request(self, operation, *words, **more):
        with lock:
            asked[self.rank, operation] += 1
        return request(self, operation, *words, **more)

    def counted_send(self, words, data=b""):
        heard[self.rank] += len(str(words)) + len(data)
        send(self, words, data)

    monkeypatch.setattr(StoreClient, "request", counted_request)
    monkeypatch.setattr(Connection, "send", counted_send)
    return asked, heard


SAME = {"digest": "0" * 64, "examples": 2490}  # what ranks tell each other of their data


def test_what_rank_0_tells_a_rank_grows_by_a_few_bytes_for_each_other_one(traffic):
    asked, heard = traffic
    told = {}
    for size in (8, 64):
        heard.clear()
        asked.clear()
        meetings = met(identities(size))
        told[size, "verdict"] = max(heard.values())
        heard.clear()
        assert all_at_once(meetings, lambda meeting: meeting.exchange(SAME)) == [[SAME] * size] * size
        told[size, "exchange"] = max(heard.values())
        kinds = ("set", "wait")
        assert asked == {(rank, kind): 1 for rank in range(1, size) for kind in kinds}
    for what in ("verdict", "exchange"):
        assert told[64, what] - told[8, what] <= 6 * (64 - 8)


def test_the_ranks_of_a_group_ask_as_often_however_many_they_are(traffic, monkeypatch):
    """gloo's own way would be two questions of each rank about each other one."""
    asked, _ = traffic
    made = threading.local()

    def keep(backend, store, rank, world_size, timeout):
        made.group = dist.ProcessGroupGloo(store, rank, world_size, timeout)

    monkeypatch.setattr(process_group.dist, "init_process_group", keep)

    def sum_of_ranks(meeting):
        process_group.open_group(meeting, "gloo")
        tensor = torch.tensor([float(meeting.identity.rank)])
        made.group.allreduce([tensor]).wait(timedelta(seconds=30))
        meeting.exchange("all have the sum")
        return tensor.item()

    questions = {}
    for size in (4, 12):
        asked.clear()
        meetings = met(identities(size))
        assert all_at_once(meetings, sum_of_ranks) == [size * (size - 1) / 2] * size
        questions[size] = {rank: sum(n for (other, _), n in asked.items() if other == rank) for rank in range(1, size)}
    assert set(questions[4].values()) == set(questions[12].values())
    assert max(questions[12].values()) < 12


def test_64_ranks_watch_over_each_other_by_a_connection_each_and_leave_in_order(servers):
    meetings = met(identities(64))
    watchdogs = all_at_once(meetings, Watchdog)
    assert sum(len(watchdog._neighbours) for watchdog in watchdogs) == 2 * 63
    assert max(len(watchdog._neighbours) for watchdog in watchdogs) == 32
    assert len(servers[0]._connections) == 63
    all_at_once(watchdogs, Watchdog.close)
    assert not any(watchdog._thread.is_alive() for watchdog in watchdogs)
