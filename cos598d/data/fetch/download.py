"""`python download_glue_data.py`: fetch GLUE, SQuAD or images, check them, and put them where training looks."""

import argparse
import dataclasses
import filecmp
import itertools
import math
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import filelock

from cos598d.data.fetch.catalogue import CATALOGUE, Dataset, choose
from cos598d.data.fetch.check import Findings, look_at
from cos598d.data.fetch.transfer import Unreachable, fetch
from cos598d.data.fetch.unpack import copy_files
from cos598d.data.task import digest_file
from cos598d.errors import ERROR, UsageError, UserError
from cos598d.terminal.printable import printable
from cos598d.terminal.signals import exits_on_sigterm


def _say(line: str) -> None:
    print(printable(line), flush=True)  # keeps the order of lines and bars in a pipe, too


def obtain(
    dataset: Dataset,
    data_dir: Path,
    base_url: str | None = None,
    timeout: float = 10.0,
    report: Callable[[str], None] = _say,
) -> None:
    """Make sure that `data_dir/dataset.folder` has the data set. Fetch it if it is missing or damaged.

    1. Files that exist and pass the check are not touched.
    2. Otherwise, one process at a time (by a lock file in `data_dir`) fetches to `*.part` files. It unpacks into a
       hidden folder next to the target, checks there, and renames. Files of the target that did not pass are renamed to
       `NAME.replaced-1`, never deleted. Wherever this is interrupted, the target has only complete files. Nothing else
       is left except `*.part` (which the next call resumes) and the lock. The next call removes a hidden folder that a
       killed process left.

    Of SQuAD and MNIST, only files that are missing or wrong are fetched. `base_url` replaces everything before the
    files' names. `timeout`: seconds, as in `fetch`. `report` gets lines of progress. Raises UserError for any fault of
    the network, the disk or the files.
    """
    target = data_dir / dataset.folder
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        found = look_at(dataset, target)
        if found.problems:
            lock = filelock.FileLock(data_dir / f".{dataset.folder}.lock")
            try:
                held = lock.acquire(timeout=0)
            except filelock.Timeout:
                report(f"{dataset.name}: another process is fetching into this folder; waiting for it.")
                held = lock.acquire()
            with held:
                found = look_at(dataset, target)  # the previous holder of the lock may have fetched it
                if found.problems:
                    _fetch_and_install(dataset, found, data_dir, base_url, timeout, report)
                    return
    except OSError as error:
        raise UserError(
            f"{dataset.name} cannot be put into {data_dir} ({error.strerror or error}). "
            "Make room there, permit writing there, or give another --data_dir."
        ) from error
    report(f"{dataset.name}: already there ({_described(found)}).")


def _fetch_and_install(
    dataset: Dataset,
    present: Findings,
    data_dir: Path,
    base_url: str | None,
    timeout: float,
    report: Callable[[str], None],
) -> None:
    """Step 2 of `obtain`, under its lock; `present` is what is wrong with the target now."""
    target = data_dir / dataset.folder
    if dataset.unpack is copy_files:  # file by file: existing files that pass the check are not fetched
        sources = tuple(source for source in dataset.sources if source.file_name in present.problems)
        parts = tuple(part for part in dataset.parts if part.name in present.problems)
        dataset = dataclasses.replace(dataset, sources=sources, parts=parts)
    wrong = [problem for name, problem in present.problems.items() if (target / name).exists()]
    if wrong:
        report(f"{dataset.name}: {' and '.join(wrong)} in {target}; downloading it again.")
    files: dict[str, Path] = {}
    try:
        for source in dataset.sources:
            url = f"{base_url}/{source.file_name}" if base_url else source.url
            size = f" ({source.size / 1e6:.0f} MB)" if source.size and not base_url else ""
            report(f"{dataset.name}: fetching {url}{size}")
            files[source.file_name] = fetch(url, data_dir, timeout, report=report)
    except UserError as error:
        raise UserError(f"{dataset.name}: {error}. {_ways_out(dataset, target, error)}.") from error

    staging = data_dir / f".{dataset.folder}.unpacking"
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir()
    try:
        published = all(digest_file(files[source.file_name])[0] == source.sha256 for source in dataset.sources)
        unpacked = dataset.unpack(files, staging)
        found = look_at(dataset, unpacked, published)
        if found.problems:
            problems = " and ".join(found.problems.values())
            raise UserError(f"{dataset.name}: in the downloaded files, {problems}. {_ways_out(dataset, target)}.")
        aside = _install(unpacked, target, present)
    except UserError:
        for path in files.values():  # complete but wrong: resuming would give the same file again
            path.unlink(missing_ok=True)
        raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    for path in files.values():
        path.unlink(missing_ok=True)
    if not published and found.digests.total() < len(found.rows):
        found.notes.append("not byte for byte the published file (its sha256 differs); only the number of rows matches")
    report(f"{dataset.name}: {_described(found)}, in {target}.")
    for kept in aside:
        report(f"{dataset.name}: the files that were there before are kept as {kept}.")


def _install(unpacked: Path, target: Path, present: Findings) -> list[Path]:
    """Move the checked files to their place: the whole folder at once, or file by file if the folder exists.

    Only files that did not pass the check are replaced. Returns where the old ones were moved.
    """
    if not target.exists():
        unpacked.rename(target)
        return []
    aside = []
    for fresh in sorted(unpacked.iterdir()):
        place = target / fresh.name
        if place.exists():
            if fresh.name not in present.problems or filecmp.cmp(fresh, place, shallow=False):
                continue
            numbered = (target / f"{fresh.name}.replaced-{number}" for number in itertools.count(1))
            aside.append(next(path for path in numbered if not path.exists()))
            place.rename(aside[-1])
        fresh.rename(place)
    return aside


def _described(found: Findings) -> str:
    counts = " + ".join(str(rows) for rows in found.rows.values()) + " rows"
    digests = [f"{count} files' {kind} as recorded" for kind, count in found.digests.items()]
    return "; ".join([counts, *digests, *found.notes])


def _ways_out(dataset: Dataset, target: Path, error: UserError | None = None) -> str:
    needed = " and ".join(part.name for part in dataset.parts if not part.optional)
    ways = ["Try again later", "name a mirror with --base_url", f"copy {needed} into {target} by hand"]
    if isinstance(error, Unreachable) and dataset.variable == "GLUE_DIR":
        ways.append("train on the bundled RTE sample, which is used if GLUE_DIR is not set")
    if isinstance(error, Unreachable) and dataset.variable == "IMAGE_DIR":
        ways.append("train on scikit-learn's digits, which are here already (--task_name digits)")
    return f"{', '.join(ways[:-1])} or {ways[-1]}"


def _seconds(word: str) -> float:
    try:
        seconds = float(word)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= 3600:
        raise argparse.ArgumentTypeError(f'"{word}" is not a number of seconds above 0 and up to 3600')
    return seconds


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="download_glue_data.py",
        description="Fetch GLUE, SQuAD or images and check that they are whole. What is there and checks is skipped; "
        "a broken download is resumed; several processes may run this on one folder.",
    )
    parser.add_argument(
        "--data_dir", default="glue_data", help="the folder that gets RTE/, ..., SQuAD/, MNIST/ (default: %(default)s)"
    )
    parser.add_argument(
        "--tasks",
        default="all",
        help=f"comma-separated, of {', '.join(CATALOGUE)}; all are the texts but diagnostic (default: %(default)s)",
    )
    parser.add_argument(
        "--base_url",
        metavar="URL",
        help="fetch from URL/RTE.zip, URL/train-v1.1.json, ... instead of the publishers' hosts: a mirror is one "
        "folder with the files under their own names (python -m http.server in it will do)",
    )
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=10.0,
        metavar="SECONDS",
        help="give up when a host is silent, or sends less than 1 kB a second, for so long (default: %(default)g)",
    )
    return parser


def _mirror(address: str) -> str:
    try:
        parts = urlsplit(address)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise UsageError(f'--base_url "{address}" is not an address. Give one such as http://host/folder.')
    return address.rstrip("/")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code: 0, 1 (could not), 2 (wrong words), 130 (Ctrl-C)."""
    options = _parser().parse_args(arguments)
    data_dir = Path(options.data_dir)
    try:
        chosen = choose(options.tasks)
        base_url = None if options.base_url is None else _mirror(options.base_url)
        with exits_on_sigterm():
            for dataset in chosen:
                obtain(dataset, data_dir, base_url, options.timeout)
    except UserError as error:
        print(f"{ERROR}{printable(error)}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(f"Stopped; what has arrived is kept as *.part in {data_dir}, the same command resumes.", file=sys.stderr)
        return 130
    here = data_dir.resolve()
    folders = {"GLUE_DIR": here, "SQUAD_DIR": here / "SQuAD", "IMAGE_DIR": here}
    for variable in dict.fromkeys(dataset.variable for dataset in chosen):
        print(f"To use it: export {variable}={shlex.quote(str(folders[variable]))}")
    return 0
