"""The program's commands: `python -m cos598d COMMAND`.

Each is the file of its name here, with `add_options(parser)` and `run(options)`, which returns the exit code. Only the
one that was asked for is loaded: looking at a table or pulling an emulated host's plug needs no torch.
"""

import importlib
import sys
from collections.abc import Sequence

import cos598d
from cos598d.commands.flags import Parser
from cos598d.commands.start import guarded, loading
from cos598d.terminal.reader import ends_with_its_reader

# name -> what it does, in the order of --help
COMMANDS = {
    "train": "train and evaluate, as one rank or as the starter of local ranks",
    "demo": "tasks 1, 2(a), 2(b) and 3 one after the other, then their comparison",
    "strategies": "every strategy one after the other at equal total batch, then one table and one page",
    "sweep": "a grid of settings, batch by learning rate by hosts, each a run, then one table and one page",
    "compare": "a table of runs, from their records alone",
    "report": "a page of runs, from their records alone: HTML, PDF or Markdown",
    "bench": "gradient syncs side by side on the same batches, round by round",
    "scale": "what a model fitted to benches predicts of other links, batches and numbers of hosts",
    "learn": "the course: lessons to solve in a file, each checked on real ranks",
    "check": "try a gradient sync, your own or a registered one, on real ranks",
    "prove": "does an engine train as one process does? Gradients, weights and losses, case by case",
    "picture": "what the ranks did in a step: lanes in time, and messages step by step",
    "audit": "run any data-parallel script, unchanged, and say which silent fault it has",
    "grade": "grade a class's submissions one after the other, or one for Gradescope or Classroom 50",
    "autograder": "a zip for Gradescope that grades an assignment",
    "new": "write a starting file for a gradient sync of your own",
    "sbatch": "a script for SLURM, which trains and goes on by itself after time limits and preemptions",
    "cluster": "several hosts emulated on this machine (Linux, root)",
    "traffic": "how much travels in an epoch, by batch size and precision, predicted and counted",
    "score": "score a predictions file by the task's official rules",
    "sample": "write a bundled sample's files, to look at or to change",
}


@ends_with_its_reader
def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code: 0 well, 1 failed, 2 a wrong word on the command line."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = Parser(prog="python -m cos598d", description=cos598d.__doc__)
    parser.add_argument("--version", action="version", version=f"cos598d {cos598d.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, meaning in COMMANDS.items():
        command = commands.add_parser(name, help=meaning, description=meaning)
        if words[:1] == [name]:
            with loading():
                module = importlib.import_module(f"cos598d.commands.{name}")
                module.add_options(command)
            command.set_defaults(run=module.run, words=words)
    options = parser.parse_args(words)
    return guarded(options.run, options)
