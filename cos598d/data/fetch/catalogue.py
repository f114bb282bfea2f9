"""What `download_glue_data.py` can fetch: each data set's addresses, its files and their numbers of examples.

The row counts are from the GLUE paper, from the SQuAD papers' released files, and from the pages of MNIST and CIFAR-10.
The archives' sizes and sha256 were recorded by several public projects that fetched the same addresses. An archive that
differs is still accepted if its files have the right numbers of rows (see `check.py`). For CIFAR-10's batches, only
sizes and md5 are published (torchvision uses the same). They detect damage, and the archive's sha256 detects forgery.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cos598d.data.fetch.unpack import copy_files, split_mrpc, unpack_tar, unpack_zip
from cos598d.errors import UsageError

_GLUE = "https://dl.fbaipublicfiles.com/glue/data/"
_MRPC = "https://dl.fbaipublicfiles.com/senteval/senteval_data/"
_SQUAD = "https://rajpurkar.github.io/SQuAD-explorer/dataset/"
_MNIST = "https://ossci-datasets.s3.amazonaws.com/mnist/"
_CIFAR = "https://www.cs.toronto.edu/~kriz/"

Unpack = Callable[[Mapping[str, Path], Path], Path]


@dataclass(frozen=True)
class Download:
    """One file to fetch: its address, its sha256 if published (else ""), and its bytes if they are many (else 0)."""

    url: str
    sha256: str = ""
    size: int = 0

    @property
    def file_name(self) -> str:
        return self.url.rsplit("/", 1)[1]


@dataclass(frozen=True)
class DatasetFile:
    """One file of a data set: a TSV file, a SQuAD JSON file whose rows are questions, or a file whose rows are images
    or images' labels.

    `rows` are the accepted numbers of examples (several if different versions exist). `header`: whether the first line
    has column names. `sha256` is the digest of the file itself, if it is known ("" otherwise); otherwise `size`, in
    bytes, and `md5`, if these are known. An `optional` part may be missing: no training or evaluation here reads it.
    """

    name: str
    rows: tuple[int, ...]
    header: bool = True
    sha256: str = ""
    size: int = 0
    md5: str = ""
    optional: bool = False


@dataclass(frozen=True)
class Dataset:
    """One name that `--tasks` takes.

    `folder` is the name of its parts' folder under the data folder, whatever the archive calls its own. `unpack` gets
    the fetched files by name and an empty folder to fill, and returns the folder in there with the parts. `variable` is
    the environment variable by which the training scripts find it.
    """

    name: str
    folder: str
    sources: tuple[Download, ...]
    parts: tuple[DatasetFile, ...]
    unpack: Unpack = unpack_zip
    variable: str = "GLUE_DIR"


def _tsv(
    *rows: int | tuple[int, ...],
    parts: Sequence[str] = ("train", "dev", "test"),
    header: bool = True,
    sha256: Mapping[str, str] = {},
) -> tuple[DatasetFile, ...]:
    """The files of a GLUE task, PART.tsv, with their rows; `sha256` by part. Test files always have a header."""
    counts = (count if isinstance(count, tuple) else (count,) for count in rows)
    return tuple(
        DatasetFile(f"{part}.tsv", count, header or part == "test", sha256.get(part, ""), optional=part[:4] == "test")
        for part, count in zip(parts, counts, strict=True)
    )


def _glue(name: str, archive: str, sha256: str, parts: tuple[DatasetFile, ...]) -> Dataset:
    """A GLUE task that comes as a zip archive."""
    return Dataset(name, name, (Download(_GLUE + archive, sha256),), parts)


def _squad(version: str, train: tuple[int, str], dev: tuple[int, str]) -> Dataset:
    """One version of SQuAD: the number of questions and the sha256 of each of its two files."""
    files = {f"train-v{version}.json": train, f"dev-v{version}.json": dev}
    sources = tuple(Download(_SQUAD + name, sha256) for name, (_, sha256) in files.items())
    parts = tuple(DatasetFile(name, (questions,)) for name, (questions, _) in files.items())
    return Dataset(f"SQuAD{version}", "SQuAD", sources, parts, copy_files, "SQUAD_DIR")


_MNIST_FILES = {
    "train-images-idx3-ubyte.gz": (60_000, "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"),
    "train-labels-idx1-ubyte.gz": (60_000, "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"),
    "t10k-images-idx3-ubyte.gz": (10_000, "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"),
    "t10k-labels-idx1-ubyte.gz": (10_000, "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
}
_CIFAR_FILES = {
    "data_batch_1": (31_035_704, "c99cafc152244af753f735de768cd75f"),
    "data_batch_2": (31_035_320, "d4bba439e000b95fd0a9bffe97cbabec"),
    "data_batch_3": (31_035_999, "54ebc095f3ab1f0389bbae665268c751"),
    "data_batch_4": (31_035_696, "634d18415352ddfa80567beed471001a"),
    "data_batch_5": (31_035_623, "482c414d41f54cd18b22e5b47cb7c3cb"),
    "test_batch": (31_035_526, "40351d587109b95175f43aff81a1287e"),
}

_MNLI_PARTS = ("train", "dev_matched", "dev_mismatched", "test_matched", "test_mismatched")
_RTE_DIGESTS = {
    "train": "41e3a9b063433392343fad9e962cf2f58b681c78d8f71592f4186f0837246c5c",
    "dev": "80230dfa1347282e7b532b06a1004a76a710087541189bf874223ddf0e3819fb",
    "test": "6e33f09b5c2bfd5fd5fde217070f3dd49e484e33b9752b5864cf36fc421a213f",
}
_MRPC_FILES = {
    _MRPC + "msr_paraphrase_train.txt": "60a9b09084528f0673eedee2b69cb941920f0b8cd0eeccefc464a98768457f89",
    _MRPC + "msr_paraphrase_test.txt": "a04e271090879aaba6423d65b94950c089298587d9c084bf9cd7439bd785f784",
    _GLUE + "mrpc_dev_ids.tsv": "971d7767d81b997fd9060ade0ec23c4fc31cbb226a55d1bd4a1bac474eb81dc7",
}
_COLA = "f212fcd832b8f7b435fb991f101abf89f96b933ab400603bf198960dfc32cbff"
_SST_2 = "d67e16fb55739c1b32cdce9877596db1c127dc322d93c082281f64057c16deaa"
_STS_B = "e60a6393de5a8b5b9bac5020a1554b54e3691f9d600b775bd131e613ac179c85"
_QQP = "40e7c862c04eb26ee04b67fd900e76c45c6ba8e6d8fab4f8f1f8072a1a3fbae0"
_MNLI = "e7c1d896d26ed6caf700110645df426cc2d8ebf02a5ab743d5a5c68ac1c83633"
_QNLI = "e634e78627a29adaecd4f955359b22bf5e70f2cbd93b493f2d624138a0c0e5f5"
_RTE = "6bf86de103ecd335f3441bd43574d23fef87ecc695977a63b82d5efb206556ee"
_WNLI = "ae0e8e4d16f4d46d4a0a566ec7ecceccfd3fbfaa4a7a4b4e02848c0f2561ac46"
_DIAGNOSTIC = "0e13510b1bb14436ff7e2ee82338f0efb0133ecf2e73507a697dc210db3f05fd"

_DATASETS = (
    _glue("CoLA", "CoLA.zip", _COLA, _tsv(8551, 1043, 1063, header=False)),
    _glue("SST-2", "SST-2.zip", _SST_2, _tsv(67349, 872, 1821)),
    Dataset("MRPC", "MRPC", tuple(Download(*each) for each in _MRPC_FILES.items()), _tsv(3668, 408, 1725), split_mrpc),
    _glue("STS-B", "STS-B.zip", _STS_B, _tsv(5749, 1500, 1379)),
    # 363849: the archive that GLUE offered before the "clean" one; many folders still have it.
    _glue("QQP", "QQP-clean.zip", _QQP, _tsv((363846, 363849), 40430, 390965)),
    _glue("MNLI", "MNLI.zip", _MNLI, _tsv(392702, 9815, 9832, 9796, 9847, parts=_MNLI_PARTS)),
    _glue("QNLI", "QNLIv2.zip", _QNLI, _tsv(104743, 5463, 5463)),
    _glue("RTE", "RTE.zip", _RTE, _tsv(2490, 277, 3000, sha256=_RTE_DIGESTS)),
    _glue("WNLI", "WNLI.zip", _WNLI, _tsv(635, 71, 146)),
    Dataset(
        "diagnostic", "diagnostic", (Download(_GLUE + "AX.tsv", _DIAGNOSTIC),), _tsv(1104, parts=["AX"]), copy_files
    ),
    _squad(
        "1.1",
        (87599, "3527663986b8295af4f7fcdff1ba1ff3f72d07d61a20f487cb238a6ef92fd955"),
        (10570, "95aa6a52d5d6a735563366753ca50492a658031da74f301ac5238b03966972c9"),
    ),
    _squad(
        "2.0",
        (130319, "68dcfbb971bd3e96d5b46c7177b16c1a4e7d4bdef19fb204502738552dede002"),
        (11873, "80a5225e94905956a6446d296ca1093975c4d3b3260f1d6c8f68bc2ab77182d8"),
    ),
    Dataset(
        "MNIST",
        "MNIST",
        tuple(Download(_MNIST + name, sha256) for name, (_, sha256) in _MNIST_FILES.items()),
        tuple(DatasetFile(name, (rows,), sha256=sha256) for name, (rows, sha256) in _MNIST_FILES.items()),
        copy_files,
        "IMAGE_DIR",
    ),
    Dataset(
        "CIFAR10",
        "cifar-10-batches-py",
        (
            Download(
                _CIFAR + "cifar-10-python.tar.gz",
                "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
                170_498_071,
            ),
        ),
        tuple(DatasetFile(name, (10_000,), size=size, md5=md5) for name, (size, md5) in _CIFAR_FILES.items()),
        unpack_tar,
        "IMAGE_DIR",
    ),
)

CATALOGUE: Mapping[str, Dataset] = {dataset.name: dataset for dataset in _DATASETS}

_OTHER_NAMES: dict[str, tuple[str, ...]] = {
    "sst": ("SST-2",),
    "sts": ("STS-B",),
    "ax": ("diagnostic",),
    "squad": ("SQuAD1.1", "SQuAD2.0"),
}
_NOT_IN_ALL = ("diagnostic", "MNIST", "CIFAR10")


def choose(tasks: str, catalogue: Mapping[str, Dataset] = CATALOGUE) -> list[Dataset]:
    """The data sets in a comma-separated list, in its order, each once.

    Case and punctuation do not matter. "all" means all texts except `diagnostic`, which no task here trains on; it
    excludes images. Raises UsageError with the known names for an unknown or missing name.
    """
    known: dict[str, tuple[str, ...]] = {_plain(name): (name,) for name in catalogue}
    known |= {short: names for short, names in _OTHER_NAMES.items() if all(name in catalogue for name in names)}
    known["all"] = tuple(name for name in catalogue if name not in _NOT_IN_ALL)
    chosen: dict[str, Dataset] = {}
    for word in (word.strip() for word in tasks.split(",")):
        if not word:
            continue
        if _plain(word) not in known:
            raise UsageError(f'--tasks has the unknown name "{word}". Choose from {", ".join(catalogue)} and all.')
        chosen |= {name: catalogue[name] for name in known[_plain(word)]}
    if not chosen:
        raise UsageError(f"--tasks is empty. Give one or more of {', '.join(catalogue)}, or all.")
    return list(chosen.values())


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
