"""Files that appear whole or not at all: written beside their name, then renamed."""

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

_unfinished: set[str] = set()


@contextlib.contextmanager
def whole_file(path: str | os.PathLike, mode: str = "w") -> Iterator[IO[Any]]:
    """Open a file for writing that takes the name `path` only when the block ends well.

    `mode` is "w" (UTF-8 text) or "wb". If the block raises, nothing is left behind and
    whatever stood under `path` before still stands.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, beside = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent)
    _unfinished.add(beside)
    try:
        options = {} if "b" in mode else {"encoding": "utf-8", "newline": "\n"}
        with os.fdopen(descriptor, mode, **options) as handle:
            os.chmod(beside, 0o644)
            yield handle
        os.replace(beside, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(beside)
        raise
    finally:
        _unfinished.discard(beside)


@contextlib.contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Fill a folder that takes the name `path`, in place of an older one, only when the block ends well."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent))
    _unfinished.add(str(beside))
    try:
        beside.chmod(0o755)
        yield beside
        shutil.rmtree(path, ignore_errors=True)
        beside.rename(path)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
        _unfinished.discard(str(beside))


def write_whole(path: str | os.PathLike, content: str | bytes) -> None:
    """Write `content` to `path` whole or not at all."""
    with whole_file(path, "w" if isinstance(content, str) else "wb") as handle:
        handle.write(content)


def write_json(path: str | os.PathLike, value: Any) -> None:
    """Write `value` as indented JSON, whole or not at all. NaN and infinities are refused (ValueError)."""
    write_whole(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def read_json(path: str | os.PathLike) -> Any:
    """The value in a JSON file. ValueError for what is none, NaN and infinities among it; OSError as `open`."""
    return json.loads(Path(path).read_text(encoding="utf-8"), parse_constant=_refuse)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON number")


def remove_unfinished() -> None:
    """Delete what this process has not finished: for a process about to leave at once."""
    for beside in list(_unfinished):
        with contextlib.suppress(OSError):
            if os.path.isdir(beside):
                shutil.rmtree(beside)
            else:
                os.unlink(beside)


def cache_folder() -> Path:
    """The folder for what can be made again: COS598D_CACHE, else XDG_CACHE_HOME/cos598d, else ~/.cache/cos598d."""
    chosen = os.environ.get("COS598D_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cos598d"
