"""Many ranks: what each asks of rank 0 and hears from it hardly depends on how many there are."""

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
from meetings import all_exchange, identities, met
from programs import script

from cos598d.comm import process_group
from cos598d.errors import UserError
from cos598d.world.channel import numbered
from cos598d.world.meeting import Meeting
from cos598d.world.rendezvous import meet
from cos598d.world.server import StoreServer
from cos598d.world.store import StoreClient
from cos598d.world.watchdog import Watchdog

pytestmark = pytest.mark.usefixtures("servers")


@pytest.fixture
def traffic(monkeypatch):
    """Requests of each rank by kind, and bytes of the answers to it, from now on."""
    asked, heard, lock = Counter(), Counter(), threading.Lock()
    request, send = StoreClient.request, StoreServer._send

    def counted_request(self, operation, *words, **more):
        with lock:
            asked[self.rank, operation] += 1
        return request(self, operation, *words, **more)

    def counted_send(self, connection, payload):
        heard[connection.rank] += len(payload)
        send(self, connection, payload)

    monkeypatch.setattr(StoreClient, "request", counted_request)
    monkeypatch.setattr(StoreServer, "_send", counted_send)
    return asked, heard


def all_at_once(meetings, function):
    with ThreadPoolExecutor(len(meetings)) as pool:
        return list(pool.map(function, meetings))


SAME = {"digest": "0" * 64, "examples": 2490}  # what ranks tell each other of their data


def test_what_rank_0_tells_a_rank_grows_by_a_few_bytes_for_each_other_one(traffic):
    asked, heard = traffic
    told = {}
    for size in (8, 64):
        heard.clear()
        meetings = met(identities(size))
        assert all(isinstance(meeting, Meeting) for meeting in meetings), meetings
        told[size, "verdict"] = max(heard.values())
        heard.clear()
        assert all_at_once(meetings, lambda meeting: meeting.exchange(SAME)) == [[SAME] * size] * size
        told[size, "exchange"] = max(heard.values())
    for what in ("verdict", "exchange"):
        assert told[64, what] - told[8, what] <= 6 * (64 - 8)
    again = range(8)  # the ranks of both worlds
    assert asked == Counter({(rank, "arrive"): 1 + (rank in again) for rank in range(1, 64)}) + Counter(
        {(rank, "exchange"): 1 + (rank in again) for rank in range(64)}
    )


def test_values_that_differ_come_back_in_order_beside_values_that_are_the_same():
    assert numbered(["b", "a", "b"]) == (["b", "a"], [0, 1, 0])
    meetings = met(identities(12))
    values = [{"rank": rank // 5, "of": [1.0, None, "x"]} for rank in range(12)]
    found = all_at_once(meetings, lambda meeting: meeting.exchange(values[meeting.identity.rank]))
    assert found == [values] * 12
    assert all_exchange(meetings) == [[{"rank": rank} for rank in range(12)]] * 12


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


CLOSED = """
import os
from cos598d.comm import process_group
import torch
process_group.open_group(None, "gloo")
torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)  # loads torch.distributed.nn, which may keep the group
process_group.close_group()
print(sorted(open(f"/proc/self/task/{thread}/comm").read().strip() for thread in os.listdir("/proc/self/task")))
"""


def test_a_closed_group_has_no_threads_left():
    """A thread of gloo that runs at exit may abort the process: "terminate called without an active exception"."""
    found = subprocess.run([sys.executable, "-c", CLOSED], capture_output=True, text=True, timeout=100, check=True)
    assert "gloo" not in found.stdout
    assert "python" in found.stdout


def test_64_ranks_watch_over_each_other_by_a_connection_each_and_leave_in_order(servers):
    meetings = met(identities(64))
    watchdogs = all_at_once(meetings, Watchdog)
    assert sum(len(watchdog._neighbours) for watchdog in watchdogs) == 2 * 63
    assert max(len(watchdog._neighbours) for watchdog in watchdogs) == 32
    assert len(servers[0]._connections) == 64
    all_at_once(watchdogs, Watchdog.close)
    assert not any(watchdog._thread.is_alive() for watchdog in watchdogs)


def test_one_that_never_comes_and_one_with_another_secret_are_told_among_many():
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
        "1 came with another --secret or from another run."
    }
    assert refused.startswith(f"rank 0 at 127.0.0.1:{port} has another secret or is of another run: ")


def test_the_benchmark_of_ranks_says_what_phases_took_and_what_ranks_hold(start, tmp_path):
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
