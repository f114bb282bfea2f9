"""The peak of operations per second of all ranks' CPUs or GPUs together in a product of matrices."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from cos598d.measure.environment import computes_in_tf32
from cos598d.world.devices import gpu_of
from cos598d.world.processor import own_cores

if TYPE_CHECKING:
    from cos598d.comm.group import Ranks

# Dense products in 10^12 operations per second: in float32, in TF32 (None: the GPU has no such units) and in 16 bits.
# The key is how torch's name of the GPU begins, or a part of it; the first that fits counts. From NVIDIA's data sheets,
# whose numbers "with sparsity" are halved: nvidia.com/en-us/data-center/{h200,h100,a100,l40s,l4,a10,v100,tesla-t4}.
GPUS: tuple[tuple[str, float, float | None, float], ...] = (
    ("H200", 67, 494.7, 989.4),
    ("H100 PCIe", 51, 378, 756),
    ("H100 NVL", 60, 417.5, 835),
    ("H100", 67, 494.7, 989.4),
    ("A100", 19.5, 156, 312),
    ("L40S", 91.6, 183, 362),
    ("L4", 30.3, 60, 121),
    ("A10", 31.2, 62.5, 125),
    ("V100-PCIE", 14, None, 112),
    ("V100", 15.7, None, 125),
    ("T4", 8.1, None, 65),
)


def share_of_peak(operations: dict[str, Any], examples_per_second: float | None) -> dict[str, Any]:
    """The summary's "operations": `operations`, and the share of the peak that this rate of examples uses."""
    needed, peak = operations["per_example"], operations["peak_per_second"]
    share = needed * examples_per_second / peak if peak and examples_per_second else None
    return operations | {"share_of_peak": share}


def gpu_peak(name: str, precision: str, tf32: bool) -> float | None:
    """Operations per second of the GPU that torch calls `name`; None if it is not in GPUS, or has no bf16."""
    words = name.replace("Tesla ", "").replace("NVIDIA ", "")
    found = next((row for row in GPUS if words == row[0] or words.startswith((f"{row[0]} ", f"{row[0]}-"))), None)
    if found is None or (precision == "bf16" and found[2] is None):
        return None
    _, single, rounded, half = found
    per_second = half if precision != "fp32" else rounded if tf32 and rounded else single
    return per_second * 1e12


def peak_of_all(comm: "Ranks", precision: str, threads: int, core_peak: Callable[[str], float]) -> float | None:
    """Operations per second of all ranks' devices together in this precision; None if that is not known.

    On CPUs each rank measures one core by `core_peak`. The mean counts for each core that the ranks may use, at most
    one per thread. Ranks that share cores or a GPU share their peak. Every rank calls it.
    """
    device = comm.device
    if device.type == "cpu":
        found = comm.exchange([own_cores(), threads, core_peak(precision)])
        cores = {(machine, core) for mine, *_ in found for machine, core in mine}
        busy = min(len(cores), sum(count for _, count, _ in found))
        return busy * sum(peak for *_, peak in found) / len(found)
    peak = gpu_peak(torch.cuda.get_device_name(device), precision, computes_in_tf32(device))
    by_gpu = dict(comm.exchange([gpu_of(device), peak]))
    return None if None in by_gpu.values() else sum(by_gpu.values())
