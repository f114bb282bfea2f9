"""What `python lesson14.py` measures on this machine: the two limits of its roofline, products under it, and a step."""

import time
from collections.abc import Callable, Sequence

import torch
from torch import nn

from cos598d.models.products import core_peak, seconds_of_product

ROWS = (1, 4, 16, 64, 256)
SIDE = 1024  # of the matrix that these rows are multiplied with
LAYERS, WIDTH, INNER, TOKENS, BATCH = 4, 256, 1024, 64, 8
COPIED = 1 << 26  # bytes: more than a processor keeps near itself
REPEATS = 5  # tries, of which the best one counts

Phases = list[tuple[float, float]]


def memory_bandwidth() -> float:
    """Bytes per second that one core reads and writes while it copies a large tensor."""
    source, target = torch.ones(COPIED // 4), torch.zeros(COPIED // 4)
    found = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        target.copy_(source)
        found.append(time.perf_counter() - start)
    return 2 * COPIED / min(found)


def peak() -> float:
    """The most operations per second of one core in some tries, since other programs slow down a try."""
    return max(core_peak("fp32") for _ in range(REPEATS))


def phases_of_a_step(operations: float) -> dict[str, tuple[float, float]]:
    """Operations and least seconds of a step's phases, of a transformer that needs so many operations per sequence."""
    layer = nn.TransformerEncoderLayer(WIDTH, 4, INNER, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
    optimizer = torch.optim.AdamW(model.parameters())
    found: dict[str, list[float]] = {"forward": [], "backward": [], "optimizer": []}
    for _ in range(REPEATS):
        moments = [time.perf_counter()]
        loss = model(torch.randn(BATCH, TOKENS, WIDTH)).square().mean()
        moments.append(time.perf_counter())
        loss.backward()
        moments.append(time.perf_counter())
        optimizer.step()
        moments.append(time.perf_counter())
        optimizer.zero_grad()
        for name, start, end in zip(found, moments, moments[1:]):
            found[name].append(end - start)
    whole = BATCH * operations
    # AdamW adds and multiplies some twelve times per weight: no product, but it is work.
    stepped = 12.0 * sum(each.numel() for each in model.parameters())
    needed = {"forward": whole / 3, "backward": whole * 2 / 3, "optimizer": stepped}
    return {name: (needed[name], min(seconds)) for name, seconds in found.items()}


def products(peak: float, bandwidth: float, roofline: Callable[..., float]) -> list[tuple[int, float, float, float]]:
    """Rows of a product, its operations per byte, and its operations per second by the roofline, and in the best of
    some tries."""
    found = []
    for rows in ROWS:
        operations, moved = 2 * rows * SIDE * SIDE, 4 * (SIDE * SIDE + 2 * rows * SIDE)
        limit = operations / roofline(operations, moved, peak, bandwidth)
        seconds = min(seconds_of_product(rows, SIDE, SIDE, "fp32") for _ in range(REPEATS))
        found.append((rows, operations / moved, limit, operations / seconds))
    return found


def report(
    flops: Callable[..., float],
    roofline: Callable[..., float],
    shares: Callable[[Phases, float], Sequence[float]],
) -> None:
    """Print this machine's roofline, products of growing batches under it, and the MFU of a step's phases."""
    torch.set_num_threads(1)
    most, bandwidth = peak(), memory_bandwidth()
    print(f"one core: {most / 1e9:.0f} GFLOP/s, {bandwidth / 1e9:.1f} GB/s, {most / bandwidth:.0f} operations per byte")
    print(f"\nrows times a {SIDE} x {SIDE} matrix   operations per byte   roofline, GFLOP/s   measured, GFLOP/s")
    for rows, intensity, limit, measured in products(most, bandwidth, roofline):
        print(f"{rows:>8}{intensity:38.1f}{limit / 1e9:20.1f}{measured / 1e9:20.1f}")
    phases = phases_of_a_step(flops(LAYERS, WIDTH, INNER, TOKENS))
    print(f"\na step of {LAYERS} layers of width {WIDTH}, {BATCH} sequences of {TOKENS} tokens")
    for name, share in zip([*phases, "all"], shares(list(phases.values()), most), strict=True):
        print(f"  {name:12}{100 * share:5.1f} % of the peak")
