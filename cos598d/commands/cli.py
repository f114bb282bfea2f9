"""The words a user types: `python -m cos598d COMMAND`, and the task folders' scripts.

Only the command that was asked for is loaded: looking at a table or pulling an emulated host's plug needs no torch.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import cos598d
from cos598d.commands.flags import Parser, check_output_file
from cos598d.commands.start import loading
from cos598d.errors import UsageError, UserError
from cos598d.terminal.printable import printable
from cos598d.terminal.reader import ends_with_its_reader

# The demo compares seconds and losses: a few steps, no evaluation, no models kept.
DEMO_DEFAULTS = {"max_steps": 6, "do_train": True}
NOT_IN_DEMO = frozenset(
    (
        "sync",
        "label",
        "per_gpu_train_batch_size",
        "local_rank",
        "master_ip",
        "master_port",
        "secret",
        "silence_seconds",
        "output_dir",
        "overwrite_output_dir",
    )
    + ("do_train", "do_eval", "no_save_model", "check_replicas")
)


@ends_with_its_reader
def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code: 0 well, 1 failed, 2 a wrong word on the command line."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = Parser(prog="python -m cos598d", description=cos598d.__doc__)
    parser.add_argument("--version", action="version", version=f"cos598d {cos598d.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, (meaning, add_flags) in COMMANDS.items():
        command = commands.add_parser(name, help=meaning, description=meaning)
        if words[:1] == [name]:
            command.set_defaults(words=words, own={}, single_process=False)
            with loading():
                add_flags(command)
    options = parser.parse_args(words)
    return _guarded(options.function, options)


@ends_with_its_reader
def run_script(
    label: str, sync: str, arguments: Sequence[str] | None = None, single_process: bool = False, task: str = "glue"
) -> int:
    """A task folder's script: train under the lesson's label and sync on a GLUE task, or on SQuAD (`task` "squad")."""
    from cos598d.commands.run_flags import add_run_options
    from cos598d.data import get_task

    words = list(sys.argv[1:] if arguments is None else arguments)
    example = "" if single_process else " --master_ip IP --master_port P --world_size N --local_rank R"
    parser = Parser(
        usage=f"%(prog)s{example} [FLAGS]", description=f"{label}: fine-tune BERT with the gradient sync {sync}."
    )
    own = {"label": label, "sync": sync} | ({"task_name": task} if task == "squad" else {})
    shown = own | (get_task(task).defaults if task == "squad" else {})
    add_run_options(parser, but=frozenset(["task_name"] if task == "squad" else ["SQuAD"]), **shown)
    parser.set_defaults(words=words, own=own, single_process=single_process)
    options = parser.parse_args(words)
    return _guarded(_train, options)


def _guarded(function: Callable[[argparse.Namespace], int], options: argparse.Namespace) -> int:
    try:
        return function(options)
    except UserError as error:
        print(printable(error), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted (Ctrl-C).", file=sys.stderr)
        return 130


def _add_train(command: argparse.ArgumentParser) -> None:
    from cos598d.commands.run_flags import add_run_options

    command.set_defaults(function=_train)
    add_run_options(command)


def _train(options: argparse.Namespace) -> int:
    from cos598d.commands.run_flags import run_values
    from cos598d.config import config_from
    from cos598d.run import run
    from cos598d.world.launch import find_identity
    from cos598d.world.workers import start_local_workers

    config = config_from(options.own | run_values(options))
    place = options.world_size, options.local_rank, options.master_ip, options.master_port
    identity = find_identity(*place, options.secret, options.silence_seconds)
    if options.single_process and (identity is None or identity.world_size > 1):
        raise UsageError(f"{config.label} is a single process: leave --world_size out, or run task2a, task2b or task3.")
    if identity is None:
        config.check(options.world_size)
        return start_local_workers(options.world_size, options.master_port, options.words)
    return run(config, identity)


def _add_demo(command: argparse.ArgumentParser) -> None:
    from cos598d.commands.run_flags import add_run_options

    command.add_argument("--runs_dir", type=Path, help="folder for the records (default: a new one in runs/)")
    command.add_argument(
        "--repeats",
        type=int,
        default=1,
        metavar="N",
        help="run all of them N times, in another order each: exposed seconds then have an interval (default: 1)",
    )
    add_run_options(command, but=NOT_IN_DEMO, **DEMO_DEFAULTS)
    command.set_defaults(function=_demo, world_size=4)


def _demo(options: argparse.Namespace) -> int:
    from cos598d.commands.demo import run_demo
    from cos598d.commands.run_flags import run_values, to_words
    from cos598d.config import config_from
    from cos598d.report.load import load_run
    from cos598d.report.table import comparison
    from cos598d.world.launch import Identity

    values = run_values(options)
    values = ({"do_train": True} if "num_train_epochs" in values else DEMO_DEFAULTS) | values
    if options.repeats < 1:
        raise UsageError(f"--repeats {options.repeats}: give a number of at least 1.")
    Identity(0, options.world_size)  # for its checks
    config_from(values).check(options.world_size)
    runs = run_demo(options.runs_dir, options.world_size, to_words(values), options.repeats)
    print(comparison([load_run(folder) for folder in runs]))
    return 0


def _add_compare(command: argparse.ArgumentParser) -> None:
    command.set_defaults(function=_compare)
    command.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run's record")
    command.add_argument("--markdown", action="store_true", help="as Markdown tables")
    command.add_argument(
        "--each", action="store_true", help="a row for each run (else runs of the same settings share one)"
    )


def _compare(options: argparse.Namespace) -> int:
    from cos598d.report.load import load_run
    from cos598d.report.table import comparison

    print(comparison([load_run(folder) for folder in options.runs], options.markdown, options.each))
    return 0


def _add_report(command: argparse.ArgumentParser) -> None:
    from cos598d.commands.report import add_report_options, run_report

    command.set_defaults(function=run_report)
    add_report_options(command)


def _add_sample(command: argparse.ArgumentParser) -> None:
    command.set_defaults(function=_sample)
    command.add_argument("folder", type=Path, metavar="FOLDER")
    command.add_argument("--task", choices=("rte", "squad"), default="rte", help="which sample (default: rte)")


def _sample(options: argparse.Namespace) -> int:
    if options.task == "squad":
        from cos598d.data.samples import write_squad_sample

        print(f"wrote train and dev of SQuAD's forms v1.1 and v2.0 to {write_squad_sample(options.folder)}")
    else:
        from cos598d.data.samples import write_rte_sample

        print(f"wrote {write_rte_sample(options.folder)}/train.tsv and dev.tsv")
    return 0


def _add_score(command: argparse.ArgumentParser) -> None:
    command.set_defaults(function=_score)
    command.add_argument("--task", choices=("squad",), required=True, help="squad: 1.1 or 2.0, as the data file is")
    command.add_argument("--data", type=Path, required=True, metavar="FILE", help="SQuAD's file with the gold answers")
    command.add_argument(
        "--predictions", type=Path, required=True, metavar="FILE", help="JSON: each question's id and its answer"
    )
    command.add_argument(
        "--null_odds", type=Path, metavar="FILE", help="JSON: each question's id and how sure it has no answer (2.0)"
    )


def _score(options: argparse.Namespace) -> int:
    from cos598d.data.squad.score import score_file

    scores, remarks = score_file(options.data, options.predictions, options.null_odds)
    for remark in remarks:
        print(printable(remark), file=sys.stderr)
    print(json.dumps(scores, indent=2))
    return 0


def _add_check(command: argparse.ArgumentParser) -> None:
    command.set_defaults(function=_check)
    command.add_argument("sync", metavar="SYNC", help="FILE.py:CLASS, or a registered sync's name")
    command.add_argument("--world_sizes", default="1,2,3,4", metavar="N,N", help="ranks to try (default: 1,2,3,4)")
    command.add_argument(
        "--seconds", type=float, default=20.0, metavar="X", help="what a claim may take at one world size (default: 20)"
    )
    command.add_argument("--claims", metavar="NAME,NAME", help="the claims to try (default: all)")
    command.add_argument("--no_speed", action="store_true", help="measure no seconds")
    command.add_argument(
        "--json", metavar="FILE", help="write the card's facts there as JSON too; -: print them instead of the card"
    )


def _check(options: argparse.Namespace) -> int:
    with loading():
        from cos598d.commands.check import check

    check_output_file("--json", options.json)
    return check(options.sync, options.world_sizes, options.seconds, options.claims, not options.no_speed, options.json)


def _add_new(command: argparse.ArgumentParser) -> None:
    command.set_defaults(function=_new)
    command.add_argument("file", type=Path, metavar="FILE.py")


def _new(options: argparse.Namespace) -> int:
    from cos598d.sync.from_file import write_template

    write_template(options.file)
    print(f"wrote {options.file}; fill it in, then: python -m cos598d check {options.file}:MySync")
    return 0


def _add_bench(command: argparse.ArgumentParser) -> None:
    from cos598d.commands.bench import add_bench_options, run_bench

    command.set_defaults(function=run_bench)
    add_bench_options(command)


def _add_scale(command: argparse.ArgumentParser) -> None:
    from cos598d.commands.scale import add_scale_options, run_scale

    command.set_defaults(function=run_scale)
    add_scale_options(command)


def _add_cluster(command: argparse.ArgumentParser) -> None:
    from cos598d.commands.cluster import add_cluster_commands

    add_cluster_commands(command)


def _add_traffic(command: argparse.ArgumentParser) -> None:
    from cos598d.commands.traffic import add_traffic_options, run_traffic

    command.set_defaults(function=run_traffic)
    add_traffic_options(command)


COMMANDS: dict[str, tuple[str, Callable[[Any], None]]] = {
    "train": ("train and evaluate, as one rank or as the starter of local ranks", _add_train),
    "demo": ("tasks 1, 2(a), 2(b) and 3 one after the other, then their comparison", _add_demo),
    "compare": ("a table of runs, from their records alone", _add_compare),
    "report": ("a page of runs, from their records alone: HTML, PDF or Markdown", _add_report),
    "bench": ("gradient syncs side by side on the same batches, round by round", _add_bench),
    "scale": ("what a model fitted to benches predicts of other links, batches and numbers of hosts", _add_scale),
    "check": ("try a gradient sync, your own or a registered one, on real ranks", _add_check),
    "new": ("write a starting file for a gradient sync of your own", _add_new),
    "cluster": ("several hosts emulated on this machine (Linux, root)", _add_cluster),
    "traffic": ("how much travels in an epoch, by batch size and precision, predicted and counted", _add_traffic),
    "score": ("score a predictions file by the task's official rules", _add_score),
    "sample": ("write a bundled sample's files, to look at or to change", _add_sample),
}
