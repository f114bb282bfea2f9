"""The program's commands, in groups, and what `--help` shows of each.

Each command is the file of its name here, with `add_options(parser)` and `run(options)`, which returns the exit code.
Only the requested command is loaded, so printing a table or disconnecting an emulated host does not load torch.
"""

import argparse
import importlib
import sys
import textwrap
from collections.abc import Sequence
from typing import NamedTuple

import cos598d
from cos598d.commands.flags import WIDTH, Parser
from cos598d.commands.start import exit_code_of, loading
from cos598d.errors import UsageError
from cos598d.terminal.words import did_you_mean

PROGRAM = "cos598d"

DOCS = "docs"  # where the pages below are


class About(NamedTuple):
    """What `--help` shows of a command: what it does, its page in the documents, and the arguments of examples."""

    meaning: str
    page: str
    examples: tuple[str, ...]


# The commands in the order of --help, under their headings.
GROUPS = {
    "Train": {
        "train": About(
            "train and evaluate a model on one rank or several",
            "training.md",
            (
                "--sync ring --world_size 2 --model_name_or_path tiny --max_steps 6",
                "--task_name digits --dry_run",
            ),
        ),
        "demo": About("train the four tasks, then compare them", "lab.md", ("", "--max_steps 40 --repeats 3")),
        "strategies": About(
            "train with every parallel strategy, then compare them",
            "engines.md",
            ("--strategies baseline,ddp,zero3 --epochs 1", "--world_size 2 --runs_dir runs/all"),
        ),
        "sweep": About(
            "train over a grid of settings, then compare the runs",
            "sweeps.md",
            ("--grid batch=4,16 --grid setup=1x1,1x2 -- train --task_name digits", "experiment1 --model vit --dry_run"),
        ),
        "sbatch": About(
            "print a SLURM job that trains and resumes by itself",
            "launchers.md",
            ("--nodes 4 --time 01:00:00 -- train --sync bucketed > job.sh",),
        ),
    },
    "Look at results": {
        "compare": About(
            "print a table of runs", "report.md", ("runs/ddp runs/ring", "--assert_equal runs/before runs/after")
        ),
        "report": About(
            "make an HTML, PDF or Markdown page of runs, benches or sweeps",
            "report.md",
            ("runs/ddp runs/ring -o report.html", "runs/bench -o bench.pdf"),
        ),
        "picture": About(
            "draw what each rank did in one step",
            "pictures.md",
            ("--sync ring -o ring.svg", "--sync tree --lanes"),
        ),
        "predict": About(
            "predict with a run's model, for inputs without labels",
            "tasks.md",
            ("runs/rte --file test.tsv -o RTE.tsv", "runs/squad --question 'Who?' --context 'Ada wrote it.'"),
        ),
        "score": About(
            "score a file of predictions by the task's official rules",
            "tasks.md",
            ("--task squad --data dev-v1.1.json --predictions predictions.json",),
        ),
    },
    "Learn and teach": {
        "learn": About("take the course: lessons that are checked on real ranks", "course.md", ("", "3 --check")),
        "grade": About(
            "grade a class, or one submission",
            "teaching.md",
            (
                "FOLDER --assignment lab1.toml --csv grades.csv",
                "lesson3.py --assignment lesson3 --gradescope out.json",
            ),
        ),
        "autograder": About(
            "make a zip that grades an assignment on Gradescope",
            "teaching.md",
            ("--assignment lab1.toml -o autograder.zip",),
        ),
        "sample": About("copy a bundled data sample to a folder", "training.md", ("--task squad FOLDER",)),
    },
    "Build and test": {
        "new": About("write a template for a gradient sync of your own", "your-own.md", ("my_sync.py",)),
        "check": About(
            "test a gradient sync or a strategy, yours or a built-in one, on real ranks",
            "your-own.md",
            ("my_sync.py:MySync", "ring --world_sizes 3", "zero2 --tests steps,clipping"),
        ),
        "audit": About(
            "find silent faults in any data-parallel script",
            "audit.md",
            ("--world_size 2 -- train.py", "--world_size 4 --strict -- train.py"),
        ),
    },
    "Measure": {
        "bench": About(
            "time gradient syncs on the same batches, round by round",
            "measuring.md",
            ("--sync ddp,ring,bucketed --rounds 15", "--step --sync ddp,zero1"),
        ),
        "traffic": About(
            "train an epoch per batch size, and count its bytes (emulated hosts need root)",
            "hosts.md",
            ("--loopback --world_size 2", "--batch_sizes 16,64"),
        ),
        "scale": About(
            "predict other links, batches and numbers of hosts from benches",
            "cost.md",
            ("runs/bench --to 64 --rate 10gbit", "runs/bench -o scaling.svg"),
        ),
        "cluster": About(
            "emulate several hosts on this machine (Linux, root)",
            "hosts.md",
            ("run --hosts 4 --rate 1gbit -- python task2b/run_glue.py --max_steps 10", "cut 3"),
        ),
    },
}
COMMANDS = {name: about for group in GROUPS.values() for name, about in group.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code: 0 for success, 1 for a failure, 2 for a wrong argument."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = Parser(
        prog=PROGRAM, description=cos598d.__doc__, epilog=_overview(), usage=f"{PROGRAM} [-h] [--version] COMMAND ..."
    )
    parser.add_argument("--version", action="version", version=f"cos598d {cos598d.__version__}")
    commands = parser.add_subparsers(prog=PROGRAM, metavar="COMMAND", required=True, help=argparse.SUPPRESS)
    if not words:
        parser.print_help()
        return UsageError.exit_code
    if not words[0].startswith("-") and words[0] not in COMMANDS:
        parser.error(f"unknown command '{words[0]}'.{did_you_mean(words[0], COMMANDS)}")
    for name, about in COMMANDS.items():
        if words[0] == name:
            with loading():
                command = commands.add_parser(name, description=f"{about.meaning[0].upper()}{about.meaning[1:]}.")
                module = importlib.import_module(f"cos598d.commands.{name}")
                module.add_options(command)
            said = [textwrap.fill(command.epilog, WIDTH)] if command.epilog else []
            command.epilog = "\n\n".join([*said, _examples(name, about)])
            command.set_defaults(run=module.run, words=words)
    options = parser.parse_args(words)
    return exit_code_of(options.run, options)


def _overview() -> str:
    """The commands under their headings, for --help."""
    width = max(map(len, COMMANDS)) + 2
    lines = []
    for title, group in GROUPS.items():
        lines += [f"{title}:", *(f"  {name:{width}}{about.meaning}" for name, about in group.items()), ""]
    return "\n".join([*lines, f"`{PROGRAM} COMMAND --help` shows a command's flags, examples and its page in {DOCS}/."])


def _examples(name: str, about: About) -> str:
    """The end of a command's --help."""
    shown = [f"  {PROGRAM} {name} {words}".rstrip() for words in about.examples]
    return "\n".join(["examples:", *shown, "", f"Read more in {DOCS}/{about.page}."])
