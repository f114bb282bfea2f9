"""What a rank takes from its host: the address by which the others find it, open files, and memory that it keeps."""

import os
import platform
import re
import socket
import subprocess
import sys

import pytest
from programs import ROOT

from cos598d.world import rendezvous, server
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


def test_too_few_open_files_are_told_before_the_meeting_and_a_soft_limit_is_raised():
    def limited(soft, hard):
        words = [sys.executable, "-c", LIMITED, str(soft), str(hard)]
        return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()

    starter, rank = map(int, limited(256, 4096))
    assert starter == 2 * 200 + OTHER_FILES
    assert 400 - FIRST_FILES <= rank - (2 * 400 + OTHER_FILES) <= 400
    assert "200 ranks needs 592 open files, and this process may have 300" in limited(256, 300)[0]
    assert re.search(r"rank 0 of 400 needs 1\d{3} open files, and this process may have 700", limited(256, 700)[1])


def test_a_name_that_means_loopback_only_here_is_listened_for_everywhere(monkeypatch):
    def resolve(name, port, *_, **__):
        address = {"node7": "127.0.1.1", "node8": "192.0.2.8", "localhost": "127.0.0.1"}.get(name, name)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    assert listening_place("node7", 1)[1] == ("", 1)
    assert listening_place("node8", 1)[1] == ("192.0.2.8", 1)
    assert listening_place("localhost", 1)[1] == ("127.0.0.1", 1)
    assert listening_place("127.0.0.1", 1)[1] == ("127.0.0.1", 1)
    assert [is_loopback(name) for name in ("node7", "localhost", "127.0.1.1", "::1", "10.0.0.1")] == [
        False,
        True,
        True,
        True,
        False,
    ]


def test_rank_0_reached_by_loopback_takes_the_address_that_faces_another_host(monkeypatch):
    monkeypatch.setattr(rendezvous, "address_facing", lambda address: f"facing {address}")
    assert rendezvous._own_address("127.0.0.1", "192.0.2.7") == "facing 192.0.2.7"
    assert rendezvous._own_address("192.0.2.7", "192.0.2.7") == "192.0.2.7"
    assert rendezvous._own_address("127.0.0.1", "") == "127.0.0.1"


def test_the_verdict_numbers_the_hosts_and_names_an_address_in_another_network_than_rank_0_s():
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


def test_between_hosts_a_run_without_a_secret_says_so_in_one_line_of_rank_0(capsys):
    rendezvous._warn_of_strangers(Identity(0, 2, "192.0.2.1", 7000))
    assert (
        capsys.readouterr().err.count("warning: rank 0: no --secret, so anyone who reaches 192.0.2.1:7000 can join")
        == 1
    )
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
    """Whether memory is kept, and the page faults of a step that takes 64 MiB and frees them."""
    words = subprocess.run(
        [sys.executable, "-c", FAULTS],
        env=os.environ | environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    return words[0] == "True", float(words[1])


@pytest.mark.long
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's malloc is needed")
def test_a_step_takes_the_memory_of_the_one_before_without_faults():
    keeps, count = faults()
    assert keeps
    assert count < 100
    keeps, count = faults(MALLOC_ARENA_MAX="16")
    assert not keeps
    assert count > 10_000, "64 MiB have 16,384 pages"


@pytest.mark.skipif(malloced_bytes() is None, reason="this C library does not tell what malloc has given")
def test_what_malloc_has_given_is_known_however_it_was_given():
    for size in (1 << 16, 64 << 20):  # from the heap, and by default a block of its own
        before = malloced_bytes()
        taken = bytearray(size)
        assert malloced_bytes() - before == pytest.approx(size, rel=0.1)
        del taken
        assert malloced_bytes() - before == pytest.approx(0, abs=size / 10)


def test_what_the_user_has_set_stays():
    assert not keep_freed_memory({"MALLOC_MMAP_THRESHOLD_": "1000000"})
    assert not keep_freed_memory({"MALLOC_ARENA_MAX": "2"})
    assert not keep_freed_memory({"GLIBC_TUNABLES": "glibc.malloc.top_pad=100"})
