"""`python download_glue_data.py`: fetch GLUE, SQuAD or images, and put them where training looks.

The digests are those of the publishers' files, recorded by several public projects that fetched the same addresses.
"""

import argparse
import logging
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pooch

from cos598d.errors import ERROR, UserError, first_line
from cos598d.terminal.printable import printable

_GLUE = "https://dl.fbaipublicfiles.com/glue/data/"
_MRPC = "https://dl.fbaipublicfiles.com/senteval/senteval_data/"
_SQUAD = "https://rajpurkar.github.io/SQuAD-explorer/dataset/"
_CIFAR = "https://www.cs.toronto.edu/~kriz/"
_ARCHIVES = (".zip", ".tar.gz")


@dataclass(frozen=True)
class Dataset:
    """One name that --tasks takes: its folder below --data_dir, and its files' addresses with their sha256."""

    folder: str
    files: dict[str, str]


def _zip(name: str, archive: str, sha256: str) -> Dataset:
    return Dataset(name, {_GLUE + archive: sha256})


DATASETS = {
    "CoLA": _zip("CoLA", "CoLA.zip", "f212fcd832b8f7b435fb991f101abf89f96b933ab400603bf198960dfc32cbff"),
    "SST-2": _zip("SST-2", "SST-2.zip", "d67e16fb55739c1b32cdce9877596db1c127dc322d93c082281f64057c16deaa"),
    "MRPC": Dataset(
        "MRPC",
        {
            _MRPC + "msr_paraphrase_train.txt": "60a9b09084528f0673eedee2b69cb941920f0b8cd0eeccefc464a98768457f89",
            _MRPC + "msr_paraphrase_test.txt": "a04e271090879aaba6423d65b94950c089298587d9c084bf9cd7439bd785f784",
            _GLUE + "mrpc_dev_ids.tsv": "971d7767d81b997fd9060ade0ec23c4fc31cbb226a55d1bd4a1bac474eb81dc7",
        },
    ),
    "STS-B": _zip("STS-B", "STS-B.zip", "e60a6393de5a8b5b9bac5020a1554b54e3691f9d600b775bd131e613ac179c85"),
    "QQP": _zip("QQP", "QQP-clean.zip", "40e7c862c04eb26ee04b67fd900e76c45c6ba8e6d8fab4f8f1f8072a1a3fbae0"),
    "MNLI": _zip("MNLI", "MNLI.zip", "e7c1d896d26ed6caf700110645df426cc2d8ebf02a5ab743d5a5c68ac1c83633"),
    "QNLI": _zip("QNLI", "QNLIv2.zip", "e634e78627a29adaecd4f955359b22bf5e70f2cbd93b493f2d624138a0c0e5f5"),
    "RTE": _zip("RTE", "RTE.zip", "6bf86de103ecd335f3441bd43574d23fef87ecc695977a63b82d5efb206556ee"),
    "WNLI": _zip("WNLI", "WNLI.zip", "ae0e8e4d16f4d46d4a0a566ec7ecceccfd3fbfaa4a7a4b4e02848c0f2561ac46"),
    "SQuAD1.1": Dataset(
        "SQuAD",
        {
            _SQUAD + "train-v1.1.json": "3527663986b8295af4f7fcdff1ba1ff3f72d07d61a20f487cb238a6ef92fd955",
            _SQUAD + "dev-v1.1.json": "95aa6a52d5d6a735563366753ca50492a658031da74f301ac5238b03966972c9",
        },
    ),
    "SQuAD2.0": Dataset(
        "SQuAD",
        {
            _SQUAD + "train-v2.0.json": "68dcfbb971bd3e96d5b46c7177b16c1a4e7d4bdef19fb204502738552dede002",
            _SQUAD + "dev-v2.0.json": "80a5225e94905956a6446d296ca1093975c4d3b3260f1d6c8f68bc2ab77182d8",
        },
    ),
    "CIFAR10": Dataset(
        "CIFAR10",
        {_CIFAR + "cifar-10-binary.tar.gz": "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"},
    ),
}


def obtain(name: str, data_dir: Path, base_url: str | None = None) -> Path:
    """Fetch a data set into `data_dir` unless it is there. Return its folder. Raises UserError.

    1. Files are fetched into a hidden folder next to the target, and their digests are checked.
    2. An archive is unpacked only then: it is the published one.
    3. One rename gives the folder its name, so it appears complete or not at all. The hidden folder is removed.
    """
    dataset = DATASETS[name]
    target = data_dir / dataset.folder
    names = [url.rpartition("/")[2] for url in dataset.files]
    is_archive = names[0].endswith(_ARCHIVES)
    if target.is_dir() and (is_archive or name == "MRPC" or all((target / one).is_file() for one in names)):
        return target
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=data_dir, prefix=".fetching-") as hidden:
            beside, made = Path(hidden), Path(hidden) / "made"
            for (url, digest), file in zip(dataset.files.items(), names, strict=True):
                _fetch(name, f"{base_url.rstrip('/')}/{file}" if base_url else url, digest, beside / file)
            if is_archive:
                shutil.unpack_archive(beside / names[0], made)
                inside = [one for one in made.iterdir() if one.is_dir() and one.name != "__MACOSX"]
                made = inside[0] if len(inside) == 1 else made
            else:
                made.mkdir()
                for file in names:
                    (beside / file).rename(made / file)
            if name == "MRPC":
                _split_mrpc(made)
            if target.is_dir():  # SQuAD's two versions share a folder
                for one in made.iterdir():
                    one.replace(target / one.name)
            else:
                made.chmod(0o755)
                made.rename(target)
    except OSError as error:
        why = first_line(error)
        raise UserError(f"{name} cannot be put into {target} ({why}). Make room, or choose another folder.") from error
    return target


def _fetch(name: str, address: str, digest: str, file: Path) -> None:
    """Fetch one file. Raises UserError, and leaves nothing, if it does not arrive or has another digest."""
    try:
        downloader = pooch.HTTPDownloader(progressbar=sys.stderr.isatty(), timeout=30)
        pooch.retrieve(address, f"sha256:{digest}", file.name, file.parent, downloader=downloader)
    except Exception as error:  # of the network or the disk, or another digest: pooch raises what its parts do
        reason = "it has another sha256 than the published file" if "hash" in str(error) else first_line(error)
        failed = f"{name}: {address} was not fetched ({printable(reason, 200)})"
        raise UserError(f"{failed}. Try again later, or name a mirror with --base_url.") from error


def _split_mrpc(folder: Path) -> None:
    """GLUE's train.tsv and dev.tsv: the training pairs whose ids are in GLUE's list are dev."""
    header, *rows = (folder / "msr_paraphrase_train.txt").read_text(encoding="utf-8-sig").splitlines(keepends=True)
    dev = set((folder / "mrpc_dev_ids.tsv").read_text(encoding="utf-8-sig").splitlines())
    for part in ("train", "dev"):
        chosen = [row for row in rows if ("\t".join(row.split("\t")[1:3]) in dev) == (part == "dev")]
        (folder / f"{part}.tsv").write_text(header + "".join(chosen), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code: 0, 1 (could not), 2 (wrong words)."""
    parser = argparse.ArgumentParser(
        prog="download_glue_data.py", description="Fetch GLUE, SQuAD or images, and put them where training looks."
    )
    parser.add_argument(
        "--data_dir", default="glue_data", type=Path, help="the folder that gets RTE/, SQuAD/, ... (default: glue_data)"
    )
    listed = f"comma-separated, of {', '.join(DATASETS)}; all are the texts (default: all)"
    parser.add_argument("--tasks", default="all", help=listed)
    parser.add_argument("--base_url", metavar="URL", help="a mirror: one folder with all files under their own names")
    options = parser.parse_args(arguments)
    known = {name.lower(): [name] for name in DATASETS} | {"squad": ["SQuAD1.1", "SQuAD2.0"]}
    known["all"] = [name for name in DATASETS if name != "CIFAR10"]
    words = [word.strip().lower() for word in options.tasks.split(",") if word.strip()]
    if not words or not set(words) <= set(known):
        parser.error(f"--tasks {options.tasks!r} has an unknown name. Choose from {', '.join(DATASETS)} and all.")
    logging.getLogger("pooch").setLevel(logging.ERROR)  # it would announce each file
    try:
        for name in dict.fromkeys(name for word in words for name in known[word]):
            print(f"{name}: in {printable(obtain(name, options.data_dir, options.base_url))}", flush=True)
    except UserError as error:
        print(f"{ERROR}{printable(error)}", file=sys.stderr)
        return error.exit_code
    here = options.data_dir.resolve()
    print(f"To use it: export GLUE_DIR={here} SQUAD_DIR={here / 'SQuAD'} IMAGE_DIR={here}")
    return 0
