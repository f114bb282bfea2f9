"""`cos598d sample`: a bundled sample's files, to look at or to change."""

import argparse
from pathlib import Path


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's words to `parser`."""
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="folder to write to; it is created if missing")
    parser.add_argument("--task", choices=("rte", "squad"), default="rte", help="which sample (default: rte)")


def run(options: argparse.Namespace) -> int:
    """Write the files, say which, and return 0."""
    from cos598d.data.samples import write_rte_sample, write_squad_sample

    if options.task == "squad":
        print(f"wrote train and dev of SQuAD's forms v1.1 and v2.0 to {write_squad_sample(options.folder)}")
    else:
        print(f"wrote {write_rte_sample(options.folder)}/train.tsv and dev.tsv")
    return 0
