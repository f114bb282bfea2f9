"""A rank's identity from flags or a launcher's variables, rank 0's address, and the secret of the run.

Imports `world.identity` and `world.meet`, whose answer to srun's variables a test cannot see otherwise without SLURM.
"""

import pytest

from cos598d.errors import UsageError
from cos598d.world.identity import Identity, find_identity
from cos598d.world.meet import find_secret

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
SRUN = {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_NODELIST": "node[07-09,12]", "SLURM_JOB_ID": "16"}
STEP = SRUN | {"SLURM_STEP_ID": "0"}
MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
FIRST_HOSTS = {"a": "a", "a,b": "a", "a[3-7]": "a3", "a[03,9]x,b": "a03x", "a-1[2]": "a-12"}
NAMES = ("source", "rank", "world_size", "master_ip", "master_port")


@pytest.mark.parametrize(
    ("words", "environ", "expected"),
    [
        ((4, 2, "10.0.0.1", 7000), TORCHRUN, ("flags", 2, 4, "10.0.0.1", 7000)),
        ((2,), TORCHRUN, ("environment", 1, 2, "10.0.0.1", 29500)),
        ((None, None, None, 7001), STEP, ("srun", 3, 4, "node07", 7001)),
        *(((), STEP | {"SLURM_NODELIST": nodes}, ("srun", 3, 4, host, 6585)) for nodes, host in FIRST_HOSTS.items()),
        ((), STEP | {"SLURM_NNODES": "1"}, ("srun", 3, 4, "127.0.0.1", 6585)),
        ((), SRUN, ("alone", 0, 1, "127.0.0.1", 6585)),  # a batch script
        ((), MPI, ("mpirun", 1, 2, "127.0.0.1", 6585)),
        ((), {"PMI_RANK": "0", "PMI_SIZE": "3"}, ("mpirun", 0, 3, "127.0.0.1", 6585)),
        ((), {}, ("alone", 0, 1, "127.0.0.1", 6585)),
        ((1, -1), {}, ("alone", 0, 1, "127.0.0.1", 6585)),
    ],
)
def test_flags_win_over_the_launcher_s_variables_and_neither_means_one_rank(words, environ, expected):
    found = find_identity(*words, environ=environ)
    assert tuple(getattr(found, name) for name in NAMES) == expected
    assert found.speaks == (found.rank == 0 or found.source == "flags")


def test_torchrun_on_one_host_listens_on_loopback_and_a_world_size_alone_means_that_we_start_the_ranks():
    assert find_identity(4, environ={}) is None
    found = find_identity(environ=TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert found.store_is_served
    assert not find_identity(environ=TORCHRUN).store_is_served
    named = TORCHRUN | {"TORCHELASTIC_RUN_ID": "1", "LOCAL_WORLD_SIZE": "2"}
    assert find_identity(environ=named).listening_ip == "127.0.0.1"
    assert find_identity(environ=named | {"LOCAL_WORLD_SIZE": "1"}).listening_ip == "10.0.0.1"


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


def test_this_user_s_secret_is_made_once_and_nobody_else_can_read_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COS598D_CACHE", str(tmp_path / "cache"))
    here, elsewhere = Identity(0, 2), Identity(0, 2, "192.0.2.1")
    (first, again) = find_secret(here), find_secret(here)
    assert first == again
    assert len(first) == 64
    (file,) = (tmp_path / "cache").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    assert find_secret(elsewhere) == b""
    assert capsys.readouterr().err.startswith("warning: this run has no secret: anybody who reaches 192.0.2.1:6585 ")
    file.chmod(0o644)
    with pytest.raises(UsageError, match="secret can be read by other users. Delete it"):
        find_secret(here)
    monkeypatch.setenv("COS598D_SECRET", "given")
    assert find_secret(here) == find_secret(elsewhere) == b"given"
