"""The cost of a checkpoint for the training: ours, torch.save, and torch.distributed.checkpoint's async_save, in turn.

    python benchmarks/checkpoint_cost.py [--model bert-base] [--rounds 7] [--folder FOLDER]

One process trains the model's shape by AdamW on made-up tokens. In each round, each way saves weights and optimizer
state once, in an order that changes from round to round, while the steps continue. It prints medians over the rounds
with minimum and maximum: the seconds for which the training pauses; the seconds until everything is on the disk,
noticed between two steps; how much longer the steps take meanwhile than those before; and the total cost for the
training. "copy" is the floor: copying the same bytes into existing memory. The first round is a warm-up, and is printed
separately.
"""

import argparse
import contextlib
import functools
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cos598d.checkpoints import Checkpoints, RankState, random_states
from cos598d.comm import process_group
from cos598d.comm.communicator import Communicator
from cos598d.config import RunConfig
from cos598d.models.build import build_model, find_model
from cos598d.strategies import get_strategy
from cos598d.strategies.optimizers import make_optimizer
from cos598d.terminal.tables import as_text

STEPS_BEFORE = 5  # with which a round's steps during a save are compared

# Begins save number N; returns a function that checks whether it is on the disk.
Save = Callable[[int], Callable[[], bool]]


class Training:
    """A model and AdamW with its state, stepping on made-up tokens under the simplest strategy."""

    def __init__(self, name: str, batch: int, tokens: int):
        self.comm = Communicator(None, "gloo", torch.device("cpu"))
        self.model = build_model(find_model(name), "sequence_classification", 2, None, seed=1)
        config = RunConfig()
        self.strategy = get_strategy("none")(self.comm, False, config.sync_options(), "fp32")
        self.module = self.strategy.attach(self.model, functools.partial(make_optimizer, config=config))
        vocabulary = self.model.config.vocab_size
        self.inputs = {
            "input_ids": torch.randint(vocabulary, (batch, tokens)),
            "labels": torch.randint(2, (batch,)),
        }
        self.iteration = 0

    def step(self) -> float:
        """One step; return its seconds."""
        started = time.perf_counter()
        self.strategy.backward(self.module(**self.inputs)[0])
        self.strategy.finish()
        self.strategy.clip(1.0)
        self.strategy.step()
        self.iteration += 1
        return time.perf_counter() - started

    def state(self) -> dict:
        """Weights and optimizer state as torch's users save them."""
        return {"model": self.model.state_dict(), "optimizer": self.strategy.optimizer.state_dict()}


@contextlib.contextmanager
def ours(training: Training, folder: Path) -> Iterator[Save]:
    """This project's checkpoints: verified by SHA-256, synced to the disk, the older one removed."""

    def fail(sentence: str) -> None:
        raise SystemExit(sentence)

    with Checkpoints(folder, training.comm, 1, lambda _: None, {}, None, fail) as checkpoints:

        def save(_: int) -> Callable[[], bool]:
            iteration = training.iteration
            checkpoints.save(
                training.strategy, iteration, {}, lambda: RankState({}, random_states(training.comm.device))
            )

            def is_written() -> bool:
                checkpoints.poll()
                return checkpoints.newest == iteration

            return is_written

        yield save
        checkpoints.close()


@contextlib.contextmanager
def torch_save(training: Training, folder: Path) -> Iterator[Save]:
    """torch.save to a temporary file, synced to the disk, and renamed: the training pauses."""

    def save(_: int) -> Callable[[], bool]:
        with (folder / "part").open("wb") as file:
            torch.save(training.state(), file)
            file.flush()
            os.fsync(file.fileno())
        (folder / "part").rename(folder / "saved.pt")
        return lambda: True

    yield save


@contextlib.contextmanager
def dcp_async(training: Training, folder: Path) -> Iterator[Save]:
    """torch.distributed.checkpoint.async_save: a copy, then a thread that writes; the older one removed."""

    def save(number: int) -> Callable[[], bool]:
        future = dcp.async_save(training.state(), checkpoint_id=str(folder / str(number)))
        older = folder / str(number - 1)

        def is_written() -> bool:
            if not future.done():
                return False
            future.result()
            shutil.rmtree(older, ignore_errors=True)
            return True

        return is_written

    yield save


@contextlib.contextmanager
def copy_alone(training: Training, _: Path) -> Iterator[Save]:
    """The floor: the same bytes into existing memory, without a disk."""
    tensors = [
        *training.model.state_dict().values(),
        *(t for state in training.strategy.optimizer.state.values() for t in state.values()),
    ]
    places = [tensor.clone() for tensor in tensors]

    def save(_: int) -> Callable[[], bool]:
        for place, tensor in zip(places, tensors, strict=True):
            place.copy_(tensor)
        return lambda: True

    yield save


WAYS = {"ours": ours, "torch.save": torch_save, "dcp.async_save": dcp_async, "copy": copy_alone}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bert-base", choices=("bert-base", "tiny"))
    parser.add_argument("--rounds", type=int, default=7, help="besides the first (default: 7)")
    parser.add_argument("--batch", type=int, default=4, help="examples per step (default: 4)")
    parser.add_argument("--tokens", type=int, default=64, help="tokens an example (default: 64)")
    parser.add_argument("--folder", type=Path, help="a folder on the disk to try (default: that of temporary files)")
    options = parser.parse_args()
    process_group.open_group(None, "gloo")
    training = Training(options.model, options.batch, options.tokens)
    training.step()
    saved = sum(t.nbytes for part in training.state().values() for t in tensors_in(part))
    print(f"{options.model}: {saved / 1e9:.2f} GB of weights and optimizer state, {torch.get_num_threads()} threads")
    rounds: list[dict[str, dict[str, float]]] = []
    with tempfile.TemporaryDirectory(dir=options.folder) as place, contextlib.ExitStack() as stack:
        saves = {}
        for name, way in WAYS.items():
            (Path(place) / name).mkdir()
            saves[name] = stack.enter_context(way(training, Path(place) / name))
        for number in range(options.rounds + 1):
            names = list(saves)[number % len(saves) :] + list(saves)[: number % len(saves)]
            rounds.append({name: one_save(training, saves[name], number) for name in names})
            print(f"round {number} of {options.rounds}", file=sys.stderr, flush=True)
    print("\nthe first:\n" + table(rounds[:1]))
    print(f"\nthe {options.rounds} after it, median (least to most):\n" + table(rounds[1:]))
    process_group.close_group()


def one_save(training: Training, save: Save, number: int) -> dict[str, float]:
    """The costs of one save during steps."""
    before = statistics.median(training.step() for _ in range(STEPS_BEFORE))
    started = time.perf_counter()
    is_written = save(number)
    blocked = time.perf_counter() - started
    meanwhile = []
    while not is_written():
        meanwhile.append(training.step())
    total = time.perf_counter() - started
    slower = sum(meanwhile) - len(meanwhile) * before
    return {"blocked": blocked, "on the disk": total, "slower": slower, "altogether": blocked + slower}


def table(rounds: list[dict[str, dict[str, float]]]) -> str:
    """Rows of ways, columns of seconds."""
    rows = [["", "s standing still", "s until on the disk", "s longer steps", "s altogether"]]
    for name in WAYS:
        rows.append([name])
        for quantity in ("blocked", "on the disk", "slower", "altogether"):
            values = [each[name][quantity] for each in rounds]
            spread = f" ({min(values):.2f} to {max(values):.2f})" if len(values) > 1 else ""
            rows[-1].append(f"{statistics.median(values):.2f}{spread}")
    return as_text(rows)


def tensors_in(part: dict) -> Iterator[torch.Tensor]:
    """The tensors in a state dict, at any depth."""
    for value in part.values():
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, dict):
            yield from tensors_in(value)


if __name__ == "__main__":
    main()
