"""A bench's record on disk: where it is, and what makes a file none. Torch-free."""

from pathlib import Path
from typing import Any

from cos598d.errors import UserError
from cos598d.files import read_json

FILE_NAME = "bench.json"


def read_record(path: Path) -> tuple[Path, dict[str, Any]]:
    """The file and what it holds, of a folder that the bench has written or of its file. Raises UserError."""
    file = path / FILE_NAME if path.is_dir() else path
    try:
        found = read_json(file)
    except OSError:
        raise UserError(f"{file} cannot be read: give a folder that `bench --output` has written.") from None
    except ValueError:
        raise UserError(f"{file} is not JSON: it is damaged, measure again.") from None
    if not isinstance(found, dict) or "candidates" not in found or "setting" not in found:
        raise UserError(f"{file} is not a bench's record: give a folder that `bench --output` has written.")
    return file, found
