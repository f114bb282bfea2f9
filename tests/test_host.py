"""What a rank takes from its host: an address for the others, open files, memory, and a GPU (simulated here)."""

import os
import platform
import re
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from programs import ROOT
from worlds import run_ranks

from cos598d.comm import process_group
from cos598d.commands.bench import peaks
from cos598d.errors import UserError
from cos598d.rank import init_rank
from cos598d.tools.bench.rounds import fits
from cos598d.tools.report.bench_table import candidate_rows
from cos598d.world import rendezvous, server
from cos598d.world.devices import AUTO_BACKEND, check_gpus_differ, choose_backend
from cos598d.world.endpoint import listen
from cos598d.world.identity import Identity
from cos598d.world.limits import FIRST_FILES, OTHER_FILES, keep_freed_memory, malloced_bytes
from cos598d.world.network import is_loopback, listening_place

LIMITED = """
import os, resource, sys
from cos598d.errors import UserError
from cos598d.world.limits import allow_descriptors, allow_workers
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[2])))
try:
    allow_workers(200)
    pipes = [os.pipe() for _ in range(200)]  # a rank inherits them
    print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    allow_descriptors(0, 400)
    print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
except UserError as error:
    print(error)
"""


def output_of(code, *words, environment=None):
    """What a fresh interpreter prints that runs this code."""
    words, environment = [sys.executable, "-c", code, *words], os.environ | (environment or {})
    return subprocess.run(words, env=environment, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_a_low_hard_limit_of_open_files_is_an_error_and_a_soft_limit_is_raised():
    def limited(soft, hard):
        return output_of(LIMITED, str(soft), str(hard)).splitlines()

    starter, rank = map(int, limited(256, 4096))
    assert starter == 2 * 200 + OTHER_FILES
    assert 400 - FIRST_FILES <= rank - (2 * 400 + OTHER_FILES) <= 400
    assert "200 ranks needs 592 open files, and this process may have 300" in limited(256, 300)[0]
    assert re.search(r"rank 0 of 400 needs 1\d{3} open files, and this process may have 700", limited(256, 700)[1])


def test_a_host_name_that_resolves_to_loopback_listens_on_all_interfaces(monkeypatch):
    def resolve(name, port, *_, **__):
        address = {"node7": "127.0.1.1", "node8": "192.0.2.8", "localhost": "127.0.0.1"}.get(name, name)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    places = {"node7": "", "node8": "192.0.2.8", "localhost": "127.0.0.1", "127.0.0.1": "127.0.0.1"}
    assert {name: listening_place(name, 1)[1] for name in places} == {name: (ip, 1) for name, ip in places.items()}
    names = ("node7", "localhost", "127.0.1.1", "::1", "10.0.0.1")
    assert [name for name in names if is_loopback(name)] == ["localhost", "127.0.1.1", "::1"]


def test_rank_0_publishes_the_address_that_faces_the_other_host(monkeypatch):
    monkeypatch.setattr(rendezvous, "address_facing", lambda address: f"facing {address}")
    assert rendezvous._own_address("127.0.0.1", "192.0.2.7") == "facing 192.0.2.7"
    assert rendezvous._own_address("192.0.2.7", "192.0.2.7") == "192.0.2.7"
    assert rendezvous._own_address("127.0.0.1", "") == "127.0.0.1"


def test_the_verdict_numbers_hosts_and_names_an_address_outside_rank_0_s_network():
    places = {1: ("a", "eth", "127.0.0.1"), 2: ("b", "other", "192.0.2.7"), 3: ("c", "third", "192.0.2.8")}

    def verdict(come):
        identity = Identity(0, len(come) + 1)
        mine = {"host": "a", "network": "eth"}
        with listen("127.0.0.1", 0) as listener:
            rank_0 = server.RendezvousServer(identity, listener, mine)
            for rank, (host, network, address) in come.items():
                rank_0._arrived[rank] = server._Arrival(None, address, {"host": host, "network": network})
            return rank_0.begin("key")

    assert verdict(places).hosts == [0, 0, 1, 2]
    assert verdict(places).elsewhere == "192.0.2.7"
    assert verdict({1: places[1]}).elsewhere == ""


def test_rank_0_warns_once_of_a_run_between_hosts_without_a_secret(capsys):
    rendezvous._warn_of_strangers(Identity(0, 2, "192.0.2.1", 7000))
    warning = "warning: rank 0: no --secret, so anyone who reaches 192.0.2.1:7000 can join"
    assert capsys.readouterr().err.count(warning) == 1
    rendezvous._warn_of_strangers(Identity(0, 2, "192.0.2.1", 7000, secret=b"s" * 16))
    rendezvous._warn_of_strangers(Identity(0, 2, "127.0.0.1", 7000))
    assert capsys.readouterr().err == ""


FAULTS = """
import resource, sys, torch
from cos598d.world.limits import keep_freed_memory
torch.set_num_threads(1)
keeps = keep_freed_memory()
def step():
    blocks = [torch.zeros(1 << 18) for _ in range(24)]  # a MiB each
    blocks.append(torch.zeros(10 << 20))  # 40 MiB
for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    step()
print(keeps, (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 10)
"""


def faults(**environment):
    """Whether memory is kept, and the page faults of a step that allocates 64 MiB and frees them."""
    keeps, count = output_of(FAULTS, environment=environment).split()
    return keeps == "True", float(count)


@pytest.mark.long
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's malloc is needed")
def test_a_step_reuses_memory_without_page_faults():
    keeps, count = faults()
    assert keeps
    assert count < 100
    keeps, count = faults(MALLOC_ARENA_MAX="16")
    assert not keeps
    assert count > 10_000, "64 MiB have 16,384 pages"


@pytest.mark.skipif(malloced_bytes() is None, reason="this C library does not count what malloc has given")
def test_memory_from_malloc_is_counted_from_the_heap_and_from_mmap():
    for size in (1 << 16, 64 << 20):  # from the heap, and by default a block of its own
        before = malloced_bytes()
        taken = bytearray(size)
        assert malloced_bytes() - before == pytest.approx(size, rel=0.1)
        del taken
        assert malloced_bytes() - before == pytest.approx(0, abs=size / 10)


def test_the_user_s_malloc_settings_stay():
    settings = {"MALLOC_MMAP_THRESHOLD_": "1", "MALLOC_ARENA_MAX": "2", "GLIBC_TUNABLES": "glibc.malloc.top_pad=100"}
    for name, value in settings.items():
        assert not keep_freed_memory({name: value}), name


GIB = 1 << 30


def gpus_taken(comm, gpus_by_rank):
    """On a rank: for each list of GPUs by rank, the index of the device that it takes under nccl, or the error."""
    torch.cuda.is_available = lambda: True
    torch.cuda.set_device = lambda device: None
    process_group.open_group = lambda meeting, backend: None
    found = []
    for gpus in gpus_by_rank:
        seen = gpus[comm.rank]
        torch.cuda.device_count = lambda seen=seen: len(seen)
        torch.cuda.get_device_properties = lambda device, seen=seen: SimpleNamespace(uuid=seen[device.index])
        try:
            found.append(init_rank(comm._meeting, "nccl", False, 1).comm.device.index)
        except UserError as error:
            found.append(str(error))
    return found


def test_nccl_is_refused_only_if_two_ranks_of_a_host_share_a_gpu():
    of_its_own, both, one = [["gpu-a"], ["gpu-b"]], [["gpu-a", "gpu-b"]] * 2, [["gpu-a"]] * 2
    answers = run_ranks(2, gpus_taken, [of_its_own, both, one])
    assert [found[0] for found in answers] == [0, 0]  # each sees its own as its first: srun --gpus-per-task=1
    assert [found[1] for found in answers] == [0, 1]
    sentence = "rank 1 has the same GPU as rank 0 (gpu-a), and nccl needs one for each rank. "
    assert [found[2].startswith(sentence) for found in answers] == [True, True]


def test_equal_gpu_names_on_two_hosts_are_two_gpus():
    check_gpus_differ(["gpu-a", "gpu-a"], ["one", "other"])
    with pytest.raises(UserError, match="rank 2 has the same GPU as rank 0"):
        check_gpus_differ(["gpu-a", "gpu-b", "gpu-a"], ["one", "one", "one"])


@pytest.mark.parametrize(
    ("gpus", "hosts", "chosen"),
    [
        (["gpu-a", "gpu-b"], ["one", "one"], "nccl"),
        (["gpu-a", "gpu-a"], ["one", "other"], "nccl"),
        (["gpu-a", "gpu-a"], ["one", "one"], "gloo"),  # one GPU is shared
        (["gpu-a", None], ["one", "other"], "gloo"),
        ([None, None], ["one", "one"], "gloo"),
        (["gpu-a"], ["one"], "gloo"),  # nothing is sent
    ],
)
def test_auto_chooses_nccl_only_if_every_rank_has_its_own_gpu(gpus, hosts, chosen):
    assert choose_backend(AUTO_BACKEND, gpus, hosts) == chosen
    assert choose_backend("nccl", gpus, hosts) == "nccl"
    assert choose_backend("gloo", gpus, hosts) == "gloo"


def test_candidates_must_fit_into_the_memory_of_each_gpu():
    each_its_own = [[f"gpu-{rank}", 4, 80 * GIB] for rank in range(4)]
    assert fits(each_its_own, 40 * GIB)  # four of them would not fit into one GPU's memory
    assert not fits([["gpu-0", 4, 80 * GIB]] * 4, 40 * GIB)
    assert not fits([*each_its_own[:3], ["gpu-3", 4, 20 * GIB]], 40 * GIB)  # the fullest decides
    assert not fits([[None, 4, 80 * GIB]] * 4, 40 * GIB)
    assert fits([[None, 4, 80 * GIB]] * 4, 10 * GIB)


def test_a_bench_shows_the_peaks_of_host_and_gpu():
    on_host = {"flat": {"process_peak_memory_bytes": [2_000_000, 3_000_000]}}
    assert peaks(on_host) == {"peak_memory_bytes": {"flat": [2_000_000, 3_000_000]}}
    found = peaks({"flat": on_host["flat"] | {"gpu_peak_memory_bytes": [7_000_000, 5_000_000]}})
    summary = {"seconds_median": 1.0, "seconds_quartiles": [1.0, 1.0], "seconds_exposed": None}
    summary |= {"ratio_to_ddp": None, "ratio_to_floor": None}
    record = {"candidates": [{"label": "flat"}], "summary": {"flat": summary}}
    record |= {"traffic": {"flat": {"calls": [1, 1], "bytes_sent": [4, 4]}}} | found
    head, row = candidate_rows(record)
    assert (head[-2:], row[-2:]) == (["peak MB", "peak GPU MB"], ["3", "7"])
