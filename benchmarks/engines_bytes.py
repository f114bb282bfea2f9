"""What engines send, counted by the kernel on emulated hosts, compared with the formulas (Linux, root, iproute2).

    python benchmarks/engines_bytes.py --runs_dir runs/engines-bytes [--sync zero1,zero3] [--hosts 4] [a run's flags]

Each trains for a few steps by `cluster run`, one rank per host. The count is what each host's interface sent per step,
with the headers of every packet. It is the mean over the hosts, with minimum and maximum. The first step is excluded,
and so are weights that are gathered after training. A run that is in the folder already is not made again; one that
fails is a row with its error. The table is printed and, with all digits, written to bytes.json in the folder.
"""

import argparse
import os
import sys
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

import torch
from made import make_run

from cos598d.comm.communicator import Communicator
from cos598d.commands.flags import to_words
from cos598d.config import RunConfig
from cos598d.errors import UserError
from cos598d.models.build import build_model, find_model
from cos598d.records.conventions import COMMUNICATION
from cos598d.records.run import CALL, WIRE, WIRE_ROW, read_table
from cos598d.strategies.engines.torch_fsdp import layers
from cos598d.strategies.parts.low_bytes import packed_bytes
from cos598d.strategies.parts.row_gradients import row_embeddings
from cos598d.strategies.parts.units import looked_up
from cos598d.strategies.zero3 import Zero3
from cos598d.terminal.fields import flags_of
from cos598d.terminal.files import write_json
from cos598d.terminal.reading import read_json
from cos598d.terminal.tables import as_text
from cos598d.tools.bench.candidates import read_candidate
from cos598d.tools.report.load import load_run

KNOWN = flags_of(RunConfig)
FEW = {"max_steps": "6", "total_train_batch_size": "16", "max_seq_length": "64"}
HEAD = ["sync", "formula", "MB", "counted MB", "by host", "off"]


@dataclass(frozen=True)
class Sizes:
    """Bytes of a model's trainable weights.

    weights: S, of all. root: R, of those in no layer of FSDP2's, which it gathers once. once: E, of those that zero3
    gathers once: large embeddings, and weights in no layer of their own. tables: T, of the embeddings of which
    sparse_zero1 sends only rows. rows: n U, where U is what each of n ranks sends of these to every other.
    """

    weights: int
    root: int
    once: int
    tables: int
    rows: int


# A program on a host whose name is its address: Horovod connects to names.
NAMED = ("unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', "{address}")
PACKED = packed_bytes(1 << 20) / (4 << 20)  # the share of weights that sparse_zero1 sends if steps are short
# What a rank sends per step, in units of (n-1)/n.
FORMULAS: dict[str, tuple[str, Callable[[Sizes], int]]] = {
    "ddp": ("2(n-1)/n S", lambda of: 2 * of.weights),
    "zero1": ("2(n-1)/n S", lambda of: 2 * of.weights),
    "sparse_zero1": ("(n-1) (1.63 (S - T)/n + U)", lambda of: round((1 + PACKED) * (of.weights - of.tables)) + of.rows),
    "zero2": ("2(n-1)/n S", lambda of: 2 * of.weights),
    "zero3": ("(n-1)/n (3S - E)", lambda of: 3 * of.weights - of.once),
    "torch_zero1": ("3(n-1)/n S", lambda of: 3 * of.weights),
    "torch_fsdp": ("(n-1)/n (3S - R)", lambda of: 3 * of.weights - of.root),
    "torch_fsdp:reduce_scatter=torch": ("(n-1)/n (4S - R)", lambda of: 4 * of.weights - of.root),
    "deepspeed:zero_stage=0": ("2(n-1)/n S", lambda of: 2 * of.weights),
    "deepspeed:zero_stage=1": ("3(n-1)/n S", lambda of: 3 * of.weights),
    "deepspeed:zero_stage=2": ("3(n-1)/n S", lambda of: 3 * of.weights),
    "deepspeed:zero_stage=3": ("3(n-1)/n S", lambda of: 3 * of.weights),
    "deepspeed:zero_stage=3:bucket_mb=1": ("4(n-1)/n S", lambda of: 4 * of.weights),
    "horovod": ("2(n-1)/n S", lambda of: 2 * of.weights),
    "horovod:compress=fp16": ("(n-1)/n S", lambda of: of.weights),
    "fabric": ("2(n-1)/n S", lambda of: 2 * of.weights),
    "fabric:fabric_strategy=fsdp2": ("(n-1)/n (4S - R)", lambda of: 4 * of.weights - of.root),
}


def main() -> int:
    """Make the missing runs, print the table and return 0, or 1 if a run failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs_dir", type=Path, required=True)
    parser.add_argument("--sync", default=",".join(FORMULAS), help="which, separated by commas (default: all)")
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--rate", default="1gbit")
    options, flags = parser.parse_known_args()
    words = options.sync.split(",")
    for word in words:
        if word not in FORMULAS:
            raise UserError(f"--sync {word}: no formula is known for it; the known ones are {', '.join(FORMULAS)}.")
    given = {flag.partition("=")[0] for flag in flags}
    flags = [*flags, *to_words({name: value for name, value in FEW.items() if f"--{name}" not in given})]
    found: dict[str, dict[str, Any]] = {}
    for word in words:
        try:
            folder = run_of(options, word, flags)
            found[word] = beside_formula(folder, FORMULAS[word][1])
        except UserError as error:
            found[word] = {"failed": str(error)}
    write_json(options.runs_dir / "bytes.json", {"hosts": options.hosts, "rate": options.rate, "flags": flags} | found)
    print(f"\nMB that a host sends in a step, counted by the kernel; {options.hosts} hosts, {options.rate}")
    print(as_text([HEAD, *(row(word, facts) for word, facts in found.items())], numbers=True))
    failures = [f"{word}: {facts['failed']}" for word, facts in found.items() if "failed" in facts]
    print(*failures, sep="\n", end="\n" if failures else "")
    return int(bool(failures))


def run_of(options: argparse.Namespace, word: str, flags: list[str]) -> Path:
    """The folder of the run, which is made unless it exists. Raises UserError if it fails."""
    sync, values = read_candidate(word)
    own = to_words({"sync": sync, **values}, RunConfig)
    train = [*(NAMED if sync == "horovod" else ()), sys.executable, "-m", "cos598d", "train", "--do_train"]
    hosts = ["--name", f"bytes{os.getpid()}", "--hosts", options.hosts, "--rate", options.rate]
    command = ["-m", "cos598d", "cluster", "run", *hosts, "--", *train, "--no_save_model", *own, *flags]
    return make_run(options.runs_dir.resolve() / word.replace(":", "-"), command)


def beside_formula(folder: Path, factor: Callable[[Sizes], int]) -> dict[str, Any]:
    """Bytes of a step by the formula, and as counted on each host; and the relative error of the mean."""
    ranks = load_run(folder)["world_size"]
    counted = [in_a_step(folder / WIRE.format(rank=rank)) for rank in range(ranks)]
    of = sizes(folder, ranks)
    formula = (ranks - 1) / ranks * factor(of)
    return asdict(of) | {"formula": formula, "counted_by_rank": counted, "off": fmean(counted) / formula - 1}


def in_a_step(file: Path) -> float:
    """The mean over all steps except the first of what an interface sent from the previous step's end to its end."""
    sent = [row["bytes_sent"] for row in read_table(file, WIRE_ROW, is_needed=False) if row["kind"] == "iteration"]
    if len(sent) < 3:  # one of them is the beginning
        raise UserError(
            "its steps were not counted: leave --monitor_interval as it is, and give --max_steps 2 or more."
        )
    return (sent[-1] - sent[1]) / (len(sent) - 2)


def sizes(folder: Path, ranks: int) -> Sizes:
    """The bytes of a run's trainable weights."""
    config = RunConfig(**{name: value for name, value in read_json(folder / "config.json").items() if name in KNOWN})
    task = config.task()
    source = find_model(config.model_name_or_path)
    model = build_model(source, task.head, task.num_labels, 0.0, config.seed)
    trained = {p: p.numel() * p.element_size() for p in model.parameters() if p.requires_grad}
    in_layers = {p for layer in layers(model) for p in layer.parameters() if p in trained}
    named = [(name, p) for name, p in model.named_parameters() if p in trained]
    zero3 = Zero3(Communicator(None, "gloo", torch.device("cpu")), options=config.sync_options())
    embeddings = looked_up(model)
    once = [
        unit
        for unit in zero3.units_of(model, named, ranks)
        if unit.layer is None or embeddings.issuperset(p for _, p in unit.parameters)
    ]
    root = sum(size for p, size in trained.items() if p not in in_layers)
    tables = {name: trained[p] for name, p in named if p in row_embeddings(model)}
    rows = round(ranks * rows_in_a_step(folder, ranks, tables))
    return Sizes(sum(trained.values()), root, sum(unit.bytes for unit in once), sum(tables.values()), rows)


def rows_in_a_step(folder: Path, ranks: int, tables: Collection[str]) -> float:
    """Bytes of these embeddings' gradients that a rank has sent to each other one, by its ledger: the mean over all
    ranks and all steps except the first; 0 if they are not sent by rows."""
    sent = []
    for rank in range(ranks):
        calls = read_table(folder / COMMUNICATION.format(rank=rank), CALL, is_needed=False)
        of_rows = [c for c in calls if c["tensor"] in tables and c["op"] == "all_gather" and c["iteration"] > 1]
        steps = len({call["iteration"] for call in of_rows}) or 1
        sent.append(sum(call["bytes_sent"] for call in of_rows) / steps / (ranks - 1))
    return fmean(sent)


def row(word: str, facts: dict[str, Any]) -> list[str]:
    """A row of the table."""
    if "failed" in facts:
        return [word, FORMULAS[word][0], "-", "failed", "-", "-"]
    counted = facts["counted_by_rank"]
    megabytes = [f"{value / 1e6:.2f}" for value in (facts["formula"], fmean(counted), min(counted), max(counted))]
    return [word, FORMULAS[word][0], *megabytes[:2], f"{megabytes[2]}-{megabytes[3]}", f"{facts['off']:+.2%}"]


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
