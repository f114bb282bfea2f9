"""Rank 0's store, the exchanges through it, and the cost of many ranks."""

import json
import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from meetings import all_at_once, exchange_works, identities, met
from programs import script, wait_until
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


def test_our_store_has_the_methods_that_torch_expects():
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


def test_a_rank_may_send_long_values_only_after_the_meeting():
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
    """Through a store of torch's, as the worlds of `check` do."""
    kept = HashStore()
    return [Meeting(Identity(rank, size), kept, ["here"] * size, seconds=20) for rank in range(size)]


@pytest.mark.parametrize("make", [meetings_in_memory, lambda size: met(identities(size))])
def test_exchange_gives_values_to_all_and_collect_only_to_rank_0(make):
    meetings = make(12)
    values = [{"rank": rank // 5, "of": [1.0, None, "x"]} for rank in range(12)]
    for _ in range(3):
        assert all_at_once(meetings, lambda meeting: meeting.exchange(values[meeting.identity.rank])) == [values] * 12
        assert exchange_works(meetings)
        found = all_at_once(meetings, lambda meeting: meeting.collect(meeting.identity.rank))
        assert found == [list(range(12)), *[None] * 11]
    if isinstance(meetings[0].store, StoreClient):
        assert meetings[0].store.num_keys() == 0, "keys of an exchange are deleted"


@pytest.mark.parametrize(("come", "words"), [([0, 1], "rank 2"), ([1, 2], "rank 0"), ([1], "ranks 0, 2")])
def test_an_exchange_names_the_ranks_that_did_not_answer(come, words):
    meetings = met(identities(3), seconds=20)
    for meeting in meetings:
        meeting.store.seconds = meeting.seconds = 0.5
    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(meetings[rank].exchange, 1) for rank in come]:
            with pytest.raises(UserError, match=f"no answer from {words} within 0.5 s"):
                future.result(30)


def test_a_rank_that_waits_while_the_store_closes_gets_no_timeout_error(servers):
    """The table ends its waits before the server closes the connections."""
    meetings = met(identities(3))
    with ThreadPoolExecutor(2) as pool:
        waits = [pool.submit(meetings[rank].exchange, 1) for rank in (0, 2)]
        wait_until(lambda: {"exchange/1/1", "exchange/1/all"} <= servers[0].table._came.keys())
        servers[0].table.close()
        for one in waits:
            with pytest.raises(DistError, match="Connection closed"):
                one.result(20)


def test_the_loss_of_rank_0_ends_calls_and_waits(servers):
    meetings = met(identities(3))
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(meetings[2].exchange, 1)
        wait_until(lambda: meetings[0].store.check(["exchange/1/2"]))
        servers[0].stop()
        for attempt in (lambda: meetings[1].exchange(1), lambda: waits.result(20)):
            with pytest.raises(DistError, match="Connection closed"):
                attempt()


def test_an_error_names_the_first_of_many_ranks():
    assert ranks_in_words([3]) == "rank 3"
    assert ranks_in_words([1, 3]) == "ranks 1, 3"
    assert ranks_in_words(list(range(100))).endswith("18, 19 and 80 more")


def test_threads_share_the_connections_of_a_store(servers):
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
    """From now on: the requests of each rank by kind, and the bytes of their answers."""
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


SAME = {"digest": "0" * 64, "examples": 2490}  # what ranks exchange about their data


def test_rank_0_s_answers_grow_by_a_few_bytes_per_rank(traffic):
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


def test_requests_per_rank_do_not_depend_on_the_world_size(traffic, monkeypatch):
    """gloo itself would ask two questions per pair of ranks."""
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


def test_64_ranks_have_one_watchdog_connection_each_and_close_it(servers):
    meetings = met(identities(64))
    watchdogs = all_at_once(meetings, Watchdog)
    assert sum(len(watchdog._neighbours) for watchdog in watchdogs) == 2 * 63
    assert max(len(watchdog._neighbours) for watchdog in watchdogs) == 32
    assert len(servers[0]._connections) == 63
    all_at_once(watchdogs, Watchdog.close)
    assert not any(watchdog._thread.is_alive() for watchdog in watchdogs)


CLOSED = """
import os
from cos598d.comm import process_group
import torch
process_group.open_group(None, "gloo")
torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)  # loads torch.distributed.nn, which may keep the group
process_group.close_group()
print(sorted(open(f"/proc/self/task/{thread}/comm").read().strip() for thread in os.listdir("/proc/self/task")))
"""
# The group is a script's, and open before anything of ours is imported.
BY_A_SCRIPT = """
import gc, os
import torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
import cos598d
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model = cos598d.data_parallel(model, "bucketed")
model(torch.ones(1)).backward()
optimizer.step()
dist.destroy_process_group()
del model
gc.collect()
print(sorted(open(f"/proc/self/task/{thread}/comm").read().strip() for thread in os.listdir("/proc/self/task")))
"""


@pytest.mark.long
@pytest.mark.parametrize("code", [CLOSED, BY_A_SCRIPT], ids=["ours", "a script's"])
def test_a_closed_group_leaves_no_threads(code):
    """A thread of gloo that runs at exit may abort the process: "terminate called without an active exception"."""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    assert "gloo" not in found.stdout
    assert "python" in found.stdout


@pytest.mark.long
def test_missing_ranks_and_a_rank_with_another_secret_are_named_among_64(servers):
    them = identities(64)
    stranger = replace(them[63], secret=b"another secret, made up")

    def come(identity):
        with pytest.raises(UserError) as caught:
            meet(identity, 4, {})
        return str(caught.value)

    with ThreadPoolExecutor(63) as pool:
        *heard, refused = pool.map(come, [*them[:62], stranger])
    port = them[0].master_port
    assert set(heard) == {
        f"ranks 62, 63 did not come to 127.0.0.1:{port} within 4 s (--timeout); "
        "1 came with another --secret or from another run. "
        "Start them again, or check --master_ip, --master_port and the firewall."
    }
    assert refused.startswith(f"rank 0 at 127.0.0.1:{port} has another secret or belongs to another run. ")


@pytest.mark.long
def test_the_benchmark_of_ranks_has_seconds_by_phase_and_sockets(start, tmp_path):
    folder = tmp_path / "runs"
    words = [script("benchmarks/ranks.py"), "--runs_dir", folder, "--world_sizes", 2, "--steps", 2]
    program = start("ranks", words, is_fresh=True)
    assert program.wait() == 0, program.text
    (found,) = json.loads((folder / "ranks.json").read_text())
    assert found["ranks"] == 2
    assert all(seconds > 0 for kind in ("clock_seconds", "processor_seconds") for seconds in found[kind].values())
    assert found["held"]["sockets"]["rank_0"] > found["held"]["sockets"]["mean"] > 2  # rank 0 serves the other one
    assert found["requests"]["arrive"] == 1
    assert "the processor's seconds of all ranks together" in program.text
    assert "meeting" in (folder / "ranks.svg").read_text()
