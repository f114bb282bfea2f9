"""`cos598d scale`: its flags, and what it prints, draws and writes."""

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cos598d.commands.flags import check_at_least_one, check_output_file
from cos598d.commands.result_flags import add_json, give_result, printer
from cos598d.cost.benches import BenchSeconds, load_records
from cos598d.cost.model import Link
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
    parser.add_argument("--to", type=int, metavar="N", help=f"the most hosts to predict (default: {LARGEST})")
    parser.add_argument(
        "--rate", metavar="RATE", help="bandwidth of each link, such as 300mbit, or none (default: the first bench's)"
    )
    parser.add_argument(
        "--delay", metavar="DELAY", help="latency between two hosts, such as 10ms (default: the first bench's)"
    )
    parser.add_argument("--batch", type=int, metavar="N", help="examples on each host (default: the first bench's)")
    parser.add_argument(
        "--predict",
        type=Path,
        nargs="+",
        metavar="BENCH",
        help="instead: predict these benches from the others, and print each sync's largest error",
    )
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="also write a plot: .svg, .png or .pdf")
    add_json(parser, "table")


def run(options: argparse.Namespace) -> int:
    """Fit the cost model, print its predictions, and return the exit code."""
    _check(options)
    options.records = options.records or sorted(path.parent for path in Path("runs").glob(f"*/{FILE_NAME}"))
    if not options.records:
        raise UsageError(f"runs/ has no folder with a {FILE_NAME}. Give the folders of one or more benches.")
    if options.predict is not None:
        text, found = _predict_records(options)
    else:
        text, found = _predict_hosts(options)
    give_result(options.json, found)
    printer(options.json)(text)
    return 0


def _check(options: argparse.Namespace) -> None:
    check_output_file("-o", options.output, ".svg", ".png", ".pdf")
    check_output_file("--json", options.json)
    if options.to is not None and not 2 <= options.to <= MOST_HOSTS:
        raise UsageError(f"--to {options.to} is not valid. Give a number of hosts from 2 to {MOST_HOSTS}.")
    check_at_least_one("--batch", options.batch)
    if options.predict is not None:
        for name in ("to", "rate", "delay", "batch", "output"):
            if getattr(options, name) is not None:
                raise UsageError(
                    f"--{name} cannot be combined with --predict, which uses its benches' own. Leave --{name} out."
                )


def _predict_hosts(options: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    from cos598d.cost.fit import fit
    from cos598d.cost.scaling import describe_fit, scale_points, scale_table

    # Before the benches are read, which takes longer than the check of an argument.
    rate = options.rate and parse_rate(options.rate)
    delay = options.delay and parse_delay(options.delay)
    records = load_records(options.records)
    first = records[0]
    link = Link(first.link.rate if options.rate is None else rate, first.link.delay if options.delay is None else delay)
    batch = options.batch or first.batch
    fitted = fit(records)
    points = scale_points(fitted, options.to or LARGEST, link, batch)
    found = _facts(fitted) | {
        "link": asdict(link),
        "batch": batch,
        "points": [asdict(point) | {"extrapolated": point.measured_seconds is None} for point in points],
    }
    if options.output:
        from cos598d.cost.plot import draw

        draw(points, options.output, f"{first.work['model']}, links of {link.words}, batch {batch} on each host")
    return f"{scale_table(points, link, batch)}\n\n{describe_fit(fitted)}", found


def _predict_records(options: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    from cos598d.cost.fit import fit
    from cos598d.cost.scaling import describe_fit, grid_table, is_crowded_otherwise, miss_table, misses

    held_out = {path.resolve(): path for path in options.predict}
    others = [path for path in options.records if path.resolve() not in held_out]
    if not others:
        raise UsageError("--predict has no other bench to predict these from. Give more folders of benches.")
    records = load_records([*others, *held_out.values()])
    fitted = fit(records[: len(others)])
    text, facts, of_all = [describe_fit(fitted)], [], {}
    for record in records[len(others) :]:
        found, own_compute = misses(fitted, record), is_crowded_otherwise(fitted, record)
        unknown = [rung.label for rung in record.rungs if rung.label not in fitted.rungs]
        of_all[Path(record.name).name] = found
        facts.append(
            {
                "predicted": record.name,
                "own_compute": own_compute,
                "misses": [asdict(miss) | {"miss": miss.miss} for miss in found],
                "not_predicted": unknown,
            }
        )
        text.append(miss_table(found, record.name, record.words, unknown, own_compute))
    if len(facts) == 1:
        return "\n\n".join(text), _facts(fitted) | facts[0]
    return "\n\n".join([*text, grid_table(of_all)]), _facts(fitted) | {"records_predicted": facts}


def _facts(fitted: Any) -> dict[str, Any]:
    def describe(record: BenchSeconds) -> dict[str, Any]:
        return {"name": record.name, "hosts": record.ranks, "link": asdict(record.link), "batch": record.batch}

    return {
        "records": [describe(record) for record in fitted.records],
        "costs": asdict(fitted.costs),
        "remarks": list(fitted.remarks),
        "left_out": fitted.left_out,
    }
