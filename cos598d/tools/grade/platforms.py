"""The zip that Gradescope runs. The results.json that it asks for is what exam/plugin.py writes.

https://gradescope-autograders.readthedocs.io/en/latest/specs/
"""

import io
import zipfile
from importlib.metadata import PackageNotFoundError, requires
from importlib.resources import files
from pathlib import Path

import cos598d
from cos598d.errors import UserError
from cos598d.tools.grade.assignment import assignment_of

PROGRAMS = {"setup.sh": "setup.sh.txt", "run_autograder": "run_autograder.sh.txt"}
EPOCH = (1980, 1, 1, 0, 0, 0)  # the same zip for the same content
PLAIN, PROGRAM = 0o100644, 0o100755


def autograder(word: str) -> bytes:
    """The zip that grades an assignment, named as for `assignment_of`, on Gradescope. It has no lesson's answer."""
    assignment = assignment_of(word)
    path = Path(word)
    text = path.read_text(encoding="utf-8") if path.is_file() else f'tests = "{assignment.tests}"\n'
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, template in PROGRAMS.items():
            _put(archive, name, (files(__package__) / template).read_bytes(), PROGRAM)
        _put(archive, "assignment.toml", text.encode())
        _put(archive, "requirements.txt", "".join(f"{each}\n" for each in requirements()).encode())
        package = Path(cos598d.__file__).parent
        for source in sorted(package.rglob("*")):
            place = source.relative_to(package)
            if source.is_file() and "__pycache__" not in place.parts and "answer" not in place.parts:
                _put(archive, f"cos598d/{place.as_posix()}", source.read_bytes())
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
