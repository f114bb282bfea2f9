"""Who am I: the flags, and the variables of torchrun, srun and mpirun."""

import pytest

from cos598d.errors import UsageError
from cos598d.world.identity import find_identity, first_host


def test_flags_win_over_the_environment():
    identity = find_identity(4, 2, "10.0.0.1", 7000, environ={"RANK": "0", "WORLD_SIZE": "8"})
    assert (identity.rank, identity.world_size, identity.master_ip, identity.master_port) == (2, 4, "10.0.0.1", 7000)
    assert identity.speaks


def test_torchrun_is_understood():
    environ = {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    identity = find_identity(2, environ=environ)
    assert (identity.rank, identity.world_size, identity.master_ip, identity.master_port) == (1, 2, "10.0.0.1", 29500)
    assert identity.store_is_served
    assert not identity.speaks


def test_srun_is_understood_and_a_batch_script_is_not_taken_for_it():
    environ = {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_NODELIST": "node[07-09,12]"}
    assert find_identity(environ=environ).source == "alone"
    identity = find_identity(master_port=7001, environ=environ | {"SLURM_STEP_ID": "0"})
    assert (identity.rank, identity.world_size, identity.master_ip, identity.master_port) == (3, 4, "node07", 7001)


@pytest.mark.parametrize(
    ("nodes", "host"),
    [("", ""), ("a", "a"), ("a,b", "a"), ("a[3-7]", "a3"), ("a[03,9]x,b", "a03x"), ("a-1[2]", "a-12")],
)
def test_first_host_of_a_slurm_list(nodes, host):
    assert first_host(nodes) == host


def test_mpirun_is_understood():
    environ = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    identity = find_identity(environ=environ)
    assert (identity.rank, identity.world_size, identity.master_ip) == (1, 2, "127.0.0.1")
    with pytest.raises(UsageError, match="MASTER_ADDR"):
        find_identity(environ=environ | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"})
    assert find_identity(environ={"PMI_RANK": "0", "PMI_SIZE": "3"}).world_size == 3


def test_without_a_rank_a_world_of_one_is_alone_and_a_larger_one_is_to_be_started():
    assert find_identity(environ={}).world_size == 1
    assert find_identity(1, -1, environ={}).source == "alone"
    assert find_identity(4, environ={}) is None


@pytest.mark.parametrize(
    ("words", "environ", "sentence"),
    [
        ((4, 4), {}, "rank 4 is outside the world: with --world_size 4 the ranks are 0 to 3"),
        ((None, 1), {}, "--local_rank 1 needs --world_size"),
        ((0, None), {}, "--world_size 0"),
        ((4, 0, None, 99999), {}, "--master_port 99999"),
        ((4,), {"RANK": "0", "WORLD_SIZE": "2"}, "contradicts torchrun, which started 2 ranks"),
        ((), {"RANK": "zero", "WORLD_SIZE": "2"}, "RANK='zero' is not a number"),
    ],
)
def test_what_cannot_be_is_said_in_a_sentence(words, environ, sentence):
    with pytest.raises(UsageError, match=sentence.replace("(", r"\(")):
        find_identity(*words, environ=environ)
