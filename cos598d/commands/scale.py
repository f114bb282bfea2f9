"""`cos598d scale`: its flags, and what it prints, draws and writes."""

import argparse
from dataclasses import asdict
from pathlib import Path

from cos598d.commands.flags import check_at_least_one, check_output_file
from cos598d.commands.result_flags import add_json, give_result, printer
from cos598d.errors import UsageError
from cos598d.records.bench import FILE_NAME
from cos598d.records.quantities import parse_delay, parse_rate

LARGEST, MOST_HOSTS = 64, 65536


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags to `parser`."""
    parser.add_argument(
        "records",
        nargs="*",
        type=Path,
        metavar="BENCH",
        help=f"folder of a bench, or its {FILE_NAME} (default: all in runs/)",
    )
    parser.add_argument(
        "--to", type=int, metavar="N", default=LARGEST, help=f"the most hosts to predict (default: {LARGEST})"
    )
    parser.add_argument(
        "--rate", metavar="RATE", help="bandwidth of each link, such as 300mbit, or none (default: the first bench's)"
    )
    parser.add_argument(
        "--delay", metavar="DELAY", help="latency between two hosts, such as 10ms (default: the first bench's)"
    )
    parser.add_argument("--batch", type=int, metavar="N", help="examples on each host (default: the first bench's)")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="also write a plot: .svg, .png or .pdf")
    add_json(parser, "table")


def run(options: argparse.Namespace) -> int:
    """Fit the predictor, print what it predicts, and return the exit code."""
    check_output_file("-o", options.output, ".svg", ".png", ".pdf")
    check_output_file("--json", options.json)
    if not 2 <= options.to <= MOST_HOSTS:
        raise UsageError(f"--to {options.to} is not valid. Give a number of hosts from 2 to {MOST_HOSTS}.")
    check_at_least_one("--batch", options.batch)
    rate, delay = options.rate and parse_rate(options.rate), options.delay and parse_delay(options.delay)
    paths = options.records or sorted(path.parent for path in Path("runs").glob(f"*/{FILE_NAME}"))
    if not paths:
        raise UsageError(f"runs/ has no folder with a {FILE_NAME}. Give the folders of one or more benches.")

    from cos598d.cost.plot import draw
    from cos598d.cost.predict import Link, fit, load
    from cos598d.cost.scaling import describe_fit, scale_points, scale_table

    benches = load(paths)
    first = benches[0].link
    link = Link(first.rate if options.rate is None else rate, first.delay if options.delay is None else delay)
    batch = options.batch or benches[0].batch
    fitted = fit(benches)
    points = scale_points(fitted, options.to, link, batch)
    if options.output:
        draw(points, options.output, f"{benches[0].work[0]}, links of {link.words}, batch {batch} on each host")
    found = {
        "benches": [one.as_dict() for one in benches],
        "costs": fitted.costs._asdict(),
        "left_out": {label: reason for one in benches for label, reason in one.left_out.items()},
        "link": link._asdict(),
        "batch": batch,
        "points": [asdict(point) for point in points],
    }
    give_result(options.json, found)
    printer(options.json)(f"{scale_table(points, link, batch)}\n\n{describe_fit(fitted)}")
    return 0
