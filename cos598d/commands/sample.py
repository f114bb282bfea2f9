"""`cos598d sample`: the files of a bundled sample, for you to read or change."""

import argparse
from pathlib import Path


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags to `parser`."""
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="folder to write to; it is created if missing")
    parser.add_argument("--task", choices=("rte", "squad"), default="rte", help="which sample (default: rte)")


def run(options: argparse.Namespace) -> int:
    """Write the files, print their names, and return 0."""
    from cos598d.data.samples import write_rte_sample, write_squad_sample

    if options.task == "squad":
        folder = write_squad_sample(options.folder)
        print(f"wrote train and dev files of SQuAD v1.1 and v2.0 to {folder}")
    else:
        print(f"wrote train.tsv and dev.tsv to {write_rte_sample(options.folder)}")
    return 0
