"""`cos598d score`: score a file of predictions by the task's official rules."""

import argparse
import json
import sys
from pathlib import Path

from cos598d.errors import WARNING
from cos598d.terminal.printable import printable


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags to `parser`."""
    parser.add_argument("--task", choices=("squad",), required=True, help="squad: version 1.1 or 2.0, as the data is")
    parser.add_argument("--data", type=Path, required=True, metavar="FILE", help="SQuAD file with the correct answers")
    parser.add_argument(
        "--predictions", type=Path, required=True, metavar="FILE", help="JSON object: question id to predicted answer"
    )
    parser.add_argument(
        "--null_odds",
        type=Path,
        metavar="FILE",
        help="JSON object: question id to the score for having no answer (SQuAD 2.0)",
    )


def run(options: argparse.Namespace) -> int:
    """Print the scores as JSON and return 0. Raises UserError for a file that cannot be scored."""
    from cos598d.data.squad import score_file

    scores, remarks = score_file(options.data, options.predictions, options.null_odds)
    for remark in remarks:
        print(f"{WARNING}{printable(remark)}", file=sys.stderr)
    print(json.dumps(scores, indent=2))
    return 0
