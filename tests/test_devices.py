"""Which GPU a rank takes and who shares it, on GPUs that are not there."""

from types import SimpleNamespace

import pytest
import torch
from worlds import run_ranks

from cos598d.comm import process_group
from cos598d.commands.bench import peaks
from cos598d.errors import UserError
from cos598d.rank import init_rank
from cos598d.tools.bench.rounds import fits
from cos598d.tools.report.bench_table import candidate_rows
from cos598d.world.devices import AUTO_BACKEND, check_gpus_differ, choose_backend

GIB = 1 << 30


def stations_on(comm, gpus_by_rank):
    """On a rank: for each world of GPUs, as nccl's rank the index of the device taken, or why not."""
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


def test_nccl_is_refused_only_where_two_ranks_of_a_host_have_the_same_gpu():
    of_its_own, both, one = [["gpu-a"], ["gpu-b"]], [["gpu-a", "gpu-b"]] * 2, [["gpu-a"]] * 2
    answers = run_ranks(2, stations_on, [of_its_own, both, one])
    assert [found[0] for found in answers] == [0, 0]  # each sees its own as its first: srun --gpus-per-task=1
    assert [found[1] for found in answers] == [0, 1]
    sentence = "rank 1 has the same GPU as rank 0 (gpu-a), and nccl needs one for each rank. "
    assert [found[2].startswith(sentence) for found in answers] == [True, True]


def test_gpus_of_one_name_on_two_hosts_are_two():
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
def test_the_backend_is_nccl_only_if_every_rank_has_a_gpu_of_its_own(gpus, hosts, chosen):
    assert choose_backend(AUTO_BACKEND, gpus, hosts) == chosen
    assert choose_backend("nccl", gpus, hosts) == "nccl"
    assert choose_backend("gloo", gpus, hosts) == "gloo"


def test_whether_all_candidates_fit_is_asked_of_each_gpu_not_of_the_host():
    each_its_own = [[f"gpu-{rank}", 4, 80 * GIB] for rank in range(4)]
    assert fits(each_its_own, 40 * GIB)  # four of them would not fit into one GPU's memory
    assert not fits([["gpu-0", 4, 80 * GIB]] * 4, 40 * GIB)
    assert not fits([*each_its_own[:3], ["gpu-3", 4, 20 * GIB]], 40 * GIB)  # the fullest decides
    assert not fits([[None, 4, 80 * GIB]] * 4, 40 * GIB)
    assert fits([[None, 4, 80 * GIB]] * 4, 10 * GIB)


def test_a_gpu_s_peak_stands_beside_the_host_s():
    on_host = {"flat": {"process_peak_memory_bytes": [2_000_000, 3_000_000]}}
    assert peaks(on_host) == {"peak_memory_bytes": {"flat": [2_000_000, 3_000_000]}}
    found = peaks({"flat": on_host["flat"] | {"gpu_peak_memory_bytes": [7_000_000, 5_000_000]}})
    summary = {"seconds_median": 1.0, "seconds_quartiles": [1.0, 1.0], "seconds_exposed": None}
    summary |= {"ratio_to_ddp": None, "ratio_to_floor": None}
    record = {"candidates": [{"label": "flat"}], "summary": {"flat": summary}}
    record |= {"traffic": {"flat": {"calls": [1, 1], "bytes_sent": [4, 4]}}} | found
    head, row = candidate_rows(record)
    assert (head[-2:], row[-2:]) == (["peak MB", "peak GPU MB"], ["3", "7"])
