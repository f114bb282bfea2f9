"""A gradient sync of your own from a file, `--sync FILE.py:CLASS`, and a template for one."""

from importlib.resources import files
from pathlib import Path

from cos598d.errors import UsageError
from cos598d.sync.base import GradientSync
from cos598d.terminal.own_code import SUFFIXES, load_class

CONTRACT = ("attach", "ready", "finish", "own_state", "detach")
TEMPLATE = "template.py.txt"


def load_own(name: str) -> type[GradientSync]:
    """The class that FILE.py:CLASS names. The path is relative to the working directory.

    Raises UsageError if there is no such file or class, if the file cannot be imported, or if the class lacks what a
    GradientSync has.
    """
    how = "Inherit them from GradientSync: class MySync(GradientSync)"
    return load_class(name, CONTRACT, "gradient sync", how)


def write_template(path: Path) -> None:
    """Write a template at `path`. Raises UsageError if the path is not a .py file, exists, or cannot be written."""
    if not path.name.endswith(SUFFIXES):
        raise UsageError(f"{path} is not the name of a Python file. Give one that ends in .py.")
    text = (files(__package__) / TEMPLATE).read_text(encoding="utf-8")
    try:
        with path.open("x", encoding="utf-8") as output:
            output.write(text.replace("FILE.py", path.name))
    except OSError as error:
        raise UsageError(f"{path} cannot be written ({error.strerror}). Give another path.") from None
