"""The program's commands, in groups, and what `--help` shows of each.

Each command is the file of its name here, with `add_options(parser)` and `run(options)`, which returns the exit code.
Only the requested command is loaded, so printing a table or disconnecting an emulated host does not load torch.
"""

import gc
import importlib
import sys
import textwrap
from collections.abc import Sequence

import cos598d
from cos598d.commands.flags import WIDTH, Parser
from cos598d.commands.start import exit_code_of
from cos598d.errors import UsageError
from cos598d.terminal.words import did_you_mean

PROGRAM = "cos598d"

# The commands in the order of --help, under their headings: what each does, and its page in docs/.
GROUPS = {
    "Train": {
        "train": ("train and evaluate a model on one rank or several", "training.md"),
        "demo": ("train the four tasks, then compare them", "lab.md"),
        "sweep": ("train over a grid of settings or with every strategy, then compare the runs", "report.md"),
    },
    "Look at results": {
        "compare": ("print a table of runs", "report.md"),
        "report": ("make an HTML, PDF or Markdown page of runs, benches or sweeps", "report.md"),
        "picture": ("draw what each rank did in one step", "report.md"),
        "predict": ("predict with a run's model, for inputs without labels", "tasks.md"),
        "score": ("score a file of predictions by the task's official rules", "tasks.md"),
    },
    "Learn and teach": {
        "learn": ("take the course: lessons that are checked on real ranks", "course.md"),
        "grade": ("grade a class, or one submission", "teaching.md"),
        "autograder": ("make a zip that grades an assignment on Gradescope", "teaching.md"),
        "sample": ("copy a bundled data sample to a folder", "training.md"),
    },
    "Build and test": {
        "new": ("write a template for a gradient sync of your own", "your-own.md"),
        "check": ("test a gradient sync or a strategy, yours or a built-in one, on real ranks", "your-own.md"),
        "audit": ("find silent faults in any data-parallel script", "audit.md"),
    },
    "Measure": {
        "bench": ("time gradient syncs on the same batches, round by round", "measuring.md"),
        "cluster": ("emulate several hosts on this machine (Linux, root)", "launchers.md"),
    },
}
COMMANDS = {name: about for group in GROUPS.values() for name, about in group.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code: 0 for success, 1 for a failure, 2 for a wrong argument."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    name = words[0] if words else ""
    if name not in COMMANDS:
        return _without_command(words)
    meaning, page = COMMANDS[name]
    parser = Parser(prog=f"{PROGRAM} {name}", description=f"{meaning[0].upper()}{meaning[1:]}.")
    module = importlib.import_module(f"cos598d.commands.{name}")
    gc.freeze()  # what is loaded stays: a collection need not look at it
    gc.enable()
    module.add_options(parser)
    said = [textwrap.fill(parser.epilog, WIDTH)] if parser.epilog else []
    parser.epilog = "\n\n".join([*said, f"Examples and more in docs/{page}."])
    return exit_code_of(module.run, parser.parse_args(words[1:]))


def _without_command(words: Sequence[str]) -> int:
    """Print the help or the version. Without any word, the help is the answer to a wrong argument."""
    usage = f"{PROGRAM} [-h] [--version] COMMAND ..."
    parser = Parser(prog=PROGRAM, description=cos598d.__doc__, epilog=_overview(), usage=usage)
    parser.add_argument("--version", action="version", version=f"cos598d {cos598d.__version__}")
    if words and not words[0].startswith("-"):
        parser.error(f"unknown command '{words[0]}'.{did_you_mean(words[0], COMMANDS)}")
    parser.parse_args(words)
    parser.print_help()
    return UsageError.exit_code


def _overview() -> str:
    """The commands under their headings, for --help."""
    width = max(map(len, COMMANDS)) + 2
    lines = []
    for title, group in GROUPS.items():
        lines += [f"{title}:", *(f"  {name:{width}}{meaning}" for name, (meaning, _) in group.items()), ""]
    return "\n".join([*lines, f"`{PROGRAM} COMMAND --help` shows a command's flags and its page in docs/."])
