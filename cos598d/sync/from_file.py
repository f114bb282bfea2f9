"""A gradient sync of your own from a file, `--sync FILE.py:CLASS`, and a template for one."""

from importlib.resources import files
from pathlib import Path

from cos598d.errors import UsageError
from cos598d.sync.base import GradientSync
from cos598d.terminal.own_code import SUFFIXES, load_class

CONTRACT = ("attach", "finish", "detach")
TEMPLATE = "template.py.txt"


def load_own(name: str) -> type[GradientSync]:
    """The class that FILE.py:CLASS names. The path is relative to the working directory.

    Raises UsageError if there is no such file or class, if the file cannot be imported, or if the class is no
    GradientSync.
    """
    how = "Inherit them from GradientSync: class MySync(GradientSync)"
    found = load_class(name, CONTRACT, "gradient sync", how)
    path = name.rpartition(":")[0]
    if not issubclass(found, GradientSync):
        raise UsageError(
            f"{found.__name__} in {path} does not inherit GradientSync. Write `from cos598d.sync.base import "
            f"GradientSync` and `class {found.__name__}(GradientSync)`."
        )
    return found


def write_template(path: Path) -> None:
    """Write a template at `path`. Raises UsageError if the path is not a .py file, exists, or cannot be written."""
    if not path.name.endswith(SUFFIXES):
        raise UsageError(f"{path} is not the name of a Python file. Give one that ends in .py.")
    text = (files(__package__) / TEMPLATE).read_text(encoding="utf-8")
    try:
        with path.open("x", encoding="utf-8") as output:
            output.write(text.replace("FILE.py", path.name))
    except FileExistsError:
        raise UsageError(f"{path} exists already and is not overwritten. Give another name.") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be written ({error.strerror}). Give another path.") from None
