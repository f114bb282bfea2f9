"""A rank's identity from flags or a launcher's variables, rank 0's address, and the secret of the run."""

import os
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from cos598d.errors import UsageError, UserError
from cos598d.world import identity as identities
from cos598d.world import secret
from cos598d.world.devices import launcher_facts, place_of, places_in_words
from cos598d.world.identity import find_identity, first_host

SECRET = {"COS598D_SECRET": "s" * 16}
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
SRUN = {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_NODELIST": "node[07-09,12]", "SLURM_JOB_ID": "16"}
STEP = SRUN | {"SLURM_STEP_ID": "0"}
MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
NAMES = ("source", "rank", "world_size", "master_ip", "master_port")


@pytest.mark.parametrize(
    ("words", "environ", "expected"),
    [
        ((4, 2, "10.0.0.1", 7000), TORCHRUN, ("flags", 2, 4, "10.0.0.1", 7000)),
        ((2,), TORCHRUN, ("environment", 1, 2, "10.0.0.1", 29500)),
        ((None, None, None, 7001), STEP, ("srun", 3, 4, "node07", 7001)),
        ((), STEP | {"SLURM_NNODES": "1"}, ("srun", 3, 4, "127.0.0.1", 6585)),
        ((), SRUN, ("alone", 0, 1, "127.0.0.1", 6585)),  # a batch script
        ((), MPI, ("mpirun", 1, 2, "127.0.0.1", 6585)),
        ((), {"PMI_RANK": "0", "PMI_SIZE": "3"}, ("mpirun", 0, 3, "127.0.0.1", 6585)),
        ((), {}, ("alone", 0, 1, "127.0.0.1", 6585)),
        ((1, -1), {}, ("alone", 0, 1, "127.0.0.1", 6585)),
    ],
)
def test_flags_win_over_the_launcher_s_variables_and_neither_means_one_rank(words, environ, expected):
    found = find_identity(*words, environ=environ | SECRET)
    assert tuple(getattr(found, name) for name in NAMES) == expected
    assert found.speaks == (found.rank == 0 or found.source == "flags")


def test_a_world_size_without_a_rank_means_that_we_start_the_ranks():
    assert find_identity(4, environ={}) is None


def test_torchrun_on_one_host_listens_on_loopback():
    found = find_identity(environ=TORCHRUN | SECRET | {"TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert found.store_is_served
    assert not find_identity(environ=TORCHRUN | SECRET).store_is_served
    named = TORCHRUN | SECRET | {"TORCHELASTIC_RUN_ID": "1", "LOCAL_WORLD_SIZE": "2"}
    assert find_identity(environ=named).listening_ip == "127.0.0.1"
    assert find_identity(environ=named | {"LOCAL_WORLD_SIZE": "1"}).listening_ip == "10.0.0.1"
    assert find_identity(environ=TORCHRUN | SECRET | {"LOCAL_WORLD_SIZE": "2"}).listening_ip == "10.0.0.1"


@pytest.mark.parametrize(
    ("words", "environ", "sentence"),
    [
        ((4, 4), {}, "rank 4 does not exist with --world_size 4. Give a rank from 0 to 3"),
        ((None, 1), {}, "--local_rank 1 needs --world_size"),
        ((0, None), {}, "--world_size 0"),
        ((4, 0, None, 99999), {}, "--master_port 99999"),
        ((4,), {"RANK": "0", "WORLD_SIZE": "2"}, "contradicts torchrun, which started 2 ranks"),
        ((), {"RANK": "zero", "WORLD_SIZE": "2"}, "RANK='zero' is not a number"),
        ((), MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, "Give rank 0's address .mpirun -x MASTER_ADDR"),
    ],
)
def test_contradictory_ranks_and_sizes_are_errors(words, environ, sentence):
    with pytest.raises(UsageError, match=sentence):
        find_identity(*words, environ=environ)


@pytest.mark.parametrize(
    ("nodes", "host"),
    [("", ""), ("a", "a"), ("a,b", "a"), ("a[3-7]", "a3"), ("a[03,9]x,b", "a03x"), ("a-1[2]", "a-12")],
)
def test_the_first_host_of_a_slurm_list(nodes, host):
    assert first_host(nodes) == host


@pytest.mark.parametrize(
    ("known", "mine", "rank", "expected"),
    [
        (True, True, 0, "node07"),
        (False, True, 0, "10.0.0.9"),  # a batch script runs on the first node
        (False, False, 0, "node07"),  # called on a login node, where no rank is
        (False, False, 3, "10.0.0.9"),
    ],
)
def test_an_unknown_node_name_is_replaced_by_the_launch_address_if_rank_0_is_there(
    known, mine, rank, expected, monkeypatch
):
    def resolve(name, *_, **__):
        if not known:
            raise socket.gaierror

    monkeypatch.setattr(identities.socket, "getaddrinfo", resolve)
    monkeypatch.setattr(identities, "interface_of", lambda address: "eth0" if mine else None)
    environ = STEP | {"SLURM_PROCID": str(rank), "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.9"}
    assert find_identity(environ=environ).master_ip == expected


def places_on(*nodes, device="cpu"):
    return [{"node": node, "device": device, "gpu": None} for node in nodes]


def test_slurm_facts_and_their_line_have_the_job_and_each_rank_s_node():
    job = STEP | {"SLURM_JOB_NAME": "bert\x1b", "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_RESTART_COUNT": "2"}
    facts = launcher_facts(find_identity(environ=job | {"SLURM_NNODES": "1"} | SECRET), job)
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


def test_the_line_under_torchrun_has_its_run_and_restarts():
    environ = TORCHRUN | {"TORCHELASTIC_RUN_ID": "night", "TORCHELASTIC_RESTART_COUNT": "3"}
    facts = launcher_facts(find_identity(environ=environ), environ)
    assert facts == {"name": "torchrun", "run": "night", "restarts": 3, "slurm": None}
    words = places_in_words(facts, places_on("a", "a", device="cuda:0"))
    assert words == "torchrun, run night, restart 3: ranks 0-1 on a (cuda:0, cuda:0)"
    many = places_in_words(facts | {"run": "none", "restarts": 0}, places_on(*map(str, range(20))))
    assert many.startswith("torchrun: rank 0 on 0, ")
    assert many.endswith("rank 7 on 7 and 12 more nodes")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Where this user's secret is kept; the other place is `tmp_path`."""
    monkeypatch.setenv("COS598D_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(secret.tempfile, "gettempdir", lambda: str(tmp_path))
    return tmp_path / "cache"


def test_this_user_s_secret_is_made_once_and_nobody_else_can_read_it(cache):
    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(lambda _: secret.find_secret(None, True, {}), range(8)))
    assert len(found) == 1
    assert len(found.pop()) == 64
    (file,) = cache.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    assert secret.find_secret(None, False, {}) == b""


@pytest.mark.parametrize("spoil", [lambda p: p.chmod(0o644), lambda p: p.write_text("short"), "link", "owner"])
def test_a_secret_that_others_can_read_or_replace_is_not_used(spoil, cache, tmp_path, monkeypatch):
    first = secret.find_secret(None, True, {})
    (file,) = cache.iterdir()
    if spoil == "link":
        file.rename(tmp_path / "elsewhere")
        file.symlink_to(tmp_path / "elsewhere")
    elif spoil == "owner":
        monkeypatch.setattr(os, "geteuid", lambda: file.stat().st_uid + 1)
        forged = cache / f"secret-{os.geteuid()}"
        forged.write_bytes(first)
        forged.chmod(0o600)
        neither = "cannot be saved as .*cache/secret-.* nor as .*. Make such a folder writable"
        with pytest.raises(UserError, match=neither):
            secret.find_secret(None, True, {})
        return
    else:
        spoil(file)
    assert secret.find_secret(None, True, {}) not in (first, b"")


def test_a_secret_is_read_from_a_private_file_or_a_variable(tmp_path):
    file = tmp_path / "secret"
    file.write_text("sixteen letters and more\n")
    file.chmod(0o600)
    identity = find_identity(2, 1, "192.0.2.1", 7000, str(file), environ={})
    assert identity.secret == b"sixteen letters and more"
    assert "sixteen" not in repr(identity)
    variable = {"COS598D_SECRET": "another one of the kind"}
    assert find_identity(2, 1, environ=variable).secret == b"another one of the kind"
    for words, environ, sentence in (
        (str(tmp_path / "none"), {}, "cannot be read"),
        (None, {"COS598D_SECRET": "short"}, "has 5 characters, and a secret needs at least 16"),
    ):
        with pytest.raises(UsageError, match=sentence):
            find_identity(2, 1, secret=words, environ=environ)
    file.chmod(0o640)
    with pytest.raises(UsageError, match="can be read or written by other users. Run `chmod 600"):
        find_identity(2, 1, secret=str(file), environ={})


def test_a_pipe_at_the_secret_s_place_does_not_block(cache):
    cache.mkdir()
    pipe = cache / f"secret-{os.geteuid()}"
    os.mkfifo(pipe, 0o600)
    assert len(secret.find_secret(None, True, {})) == 64
    with pytest.raises(UsageError, match="is not a regular file"):
        secret.find_secret(str(pipe), True, {})


def test_a_run_on_this_host_does_not_start_if_no_folder_can_keep_a_secret(cache, monkeypatch):
    cache.write_text("")  # a file where a folder should be
    monkeypatch.setattr(secret.tempfile, "gettempdir", lambda: str(cache))
    for words, environ in (((2, 0), {}), ((2, 1), {}), ((), {"RANK": "1", "WORLD_SIZE": "2"})):
        with pytest.raises(UserError, match="a folder writable for this user only, or give every rank the same COS"):
            find_identity(*words, environ=environ)
        assert find_identity(*words, environ=environ | SECRET).secret == b"s" * 16
    assert find_identity(1, 0, environ={}).secret == b""
    assert find_identity(2, 0, "192.0.2.1", environ={}).secret == b""
