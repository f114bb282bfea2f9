"""Gradescope's autograder.zip: the assignment, this package's sources without the answers of its course, setup.sh and
run_autograder."""

import io
import zipfile
from importlib.metadata import PackageNotFoundError, requires
from importlib.resources import files
from pathlib import Path

from cos598d.errors import UserError
from cos598d.tools.grade.assignment import assignment_of, package_files
from cos598d.tools.grade.kinds import KINDS
from cos598d.tools.grade.kinds.lesson import ANSWERS

PROGRAMS = {"setup.sh": "setup.sh.txt", "run_autograder": "run_autograder.sh.txt"}
EPOCH = (1980, 1, 1, 0, 0, 0)  # the same zip for the same content
PLAIN, PROGRAM = 0o100644, 0o100755


def autograder(word: str) -> bytes:
    """The zip that grades the assignment in a file, or the default one of a kind that `word` names.

    Raises UsageError for an assignment that cannot work, UserError if the package's requirements are unknown.
    """
    assignment_of(word)
    text = f'kind = "{word}"\n' if word in KINDS else Path(word).read_text(encoding="utf-8")
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, template in PROGRAMS.items():
            _put(archive, name, (files("cos598d.tools.grade") / template).read_bytes(), PROGRAM)
        _put(archive, "assignment.toml", text.encode())
        _put(archive, "requirements.txt", "".join(f"{each}\n" for each in requirements()).encode())
        for name, data in package_files():
            if not Path(name).match(ANSWERS):
                _put(archive, f"cos598d/{name}", data)
    return content.getvalue()


def requirements() -> list[str]:
    """The installed package's requirements, without the extras. Raises UserError if it is not installed."""
    try:
        found = requires("cos598d")
    except PackageNotFoundError:
        found = None
    if not found:
        raise UserError("cos598d is not installed, so its requirements are unknown. Run pip install -e . in its clone.")
    return [each for each in found if "extra ==" not in each]


def _put(archive: zipfile.ZipFile, name: str, data: bytes, mode: int = PLAIN) -> None:
    about = zipfile.ZipInfo(name, EPOCH)
    about.external_attr = mode << 16
    about.compress_type = zipfile.ZIP_DEFLATED
    archive.writestr(about, data)
