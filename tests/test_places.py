"""By which address the ranks find each other, and how many files they may open."""

import re
import socket
import subprocess
import sys

import pytest
import torch
from programs import ROOT

from cos598d.world import identity as identities
from cos598d.world import rendezvous, server
from cos598d.world.devices import launcher_facts, place_of, places_in_words
from cos598d.world.endpoint import listen
from cos598d.world.identity import Identity, find_identity
from cos598d.world.limits import FIRST_FILES, OTHER_FILES
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
    assert "the starter of 200 ranks needs 592 open files, and this process may have 300" in limited(256, 300)[0]
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


SRUN = {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "4", "SLURM_NODELIST": "node[1-2]", "SLURM_JOB_ID": "16"}


def test_srun_on_one_node_stays_on_loopback_and_knows_its_run():
    identity = find_identity(environ=SRUN | {"SLURM_PROCID": "1", "SLURM_NNODES": "1", "COS598D_SECRET": "s" * 16})
    assert (identity.master_ip, identity.run_id) == ("127.0.0.1", "16.0")


@pytest.mark.parametrize(
    ("known", "mine", "rank", "expected"),
    [
        (True, True, 0, "node1"),
        (False, True, 0, "10.0.0.9"),  # a batch script runs on the first node
        (False, False, 0, "node1"),  # called on a login node, where no rank is
        (False, False, 3, "10.0.0.9"),
    ],
)
def test_a_node_that_has_no_address_is_found_by_that_of_the_launch_where_it_is_rank_0_s(
    known, mine, rank, expected, monkeypatch
):
    def resolve(name, *_, **__):
        if not known:
            raise socket.gaierror

    monkeypatch.setattr(identities.socket, "getaddrinfo", resolve)
    monkeypatch.setattr(identities, "interface_of", lambda address: "eth0" if mine else None)
    environ = SRUN | {"SLURM_PROCID": str(rank), "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.9"}
    assert find_identity(environ=environ).master_ip == expected


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
    rendezvous._warn_of_strangers(identities.Identity(0, 2, "192.0.2.1", 7000))
    assert capsys.readouterr().err.count("rank 0: no --secret: whoever reaches 192.0.2.1:7000 can take part") == 1
    rendezvous._warn_of_strangers(identities.Identity(0, 2, "192.0.2.1", 7000, secret=b"s" * 16))
    rendezvous._warn_of_strangers(identities.Identity(0, 2, "127.0.0.1", 7000))
    assert capsys.readouterr().err == ""


JOB = SRUN | {"SLURM_JOB_NAME": "bert\x1b", "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_RESTART_COUNT": "2"}


def places_on(*nodes, device="cpu"):
    return [{"node": node, "device": device, "gpu": None} for node in nodes]


def test_the_job_the_node_and_the_gpu_of_each_rank_are_facts_and_one_line():
    identity = find_identity(environ=JOB | {"SLURM_PROCID": "1", "SLURM_NNODES": "1", "COS598D_SECRET": "s" * 16})
    facts = launcher_facts(identity, JOB)
    assert facts == {
        "name": "srun",
        "run": "16.0",
        "restarts": 0,
        "slurm": {"job": "16", "name": "bert\\x1b", "step": "0", "nodes": "n[1-3]", "partition": None, "requeues": "2"},
    }
    assert places_in_words(facts, places_on("n1", "n2", "n2", "n3")) == (
        "srun, job 16.0, requeue 2: rank 0 on n1, ranks 1-2 on n2, rank 3 on n3"
    )
    place = place_of(torch.device("cpu"), {"SLURMD_NODENAME": "n\u202e3"})
    assert place == {"node": "n\\u202e3", "device": "cpu", "gpu": None}


def test_under_torchrun_the_line_has_its_run_and_its_restarts():
    environ = {"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "night", "TORCHELASTIC_RESTART_COUNT": "3"}
    facts = launcher_facts(find_identity(environ=environ | {"MASTER_ADDR": "10.0.0.1"}), environ)
    assert facts == {"name": "torchrun", "run": "night", "restarts": 3, "slurm": None}
    words = places_in_words(facts, places_on("a", "a", device="cuda:0"))
    assert words == "torchrun, run night, restart 3: ranks 0-1 on a (cuda:0, cuda:0)"
    many = places_in_words(facts | {"run": "none", "restarts": 0}, places_on(*map(str, range(20))))
    assert many.startswith("torchrun: rank 0 on 0, ")
    assert many.endswith("rank 7 on 7 and 12 more nodes")


def test_torchruns_variables_given_by_somebody_else_name_no_torchrun():
    environ = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1"}
    assert launcher_facts(find_identity(environ=environ), environ)["name"] == "environment"
