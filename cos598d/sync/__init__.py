"""The registry of gradient syncs. Each is one file of this folder, loaded when its name is used."""

import importlib
from collections.abc import Iterable, Sequence

from cos598d.errors import UsageError
from cos598d.sync.base import GradientSync

# The names on the command line, equal to those of the files, in the order of tables.
SYNCS = (
    *("none", "gather_scatter", "reduce_broadcast", "all_reduce", "flat", "overlap", "bucketed"),
    *("ring", "halving_doubling", "tree", "shared_memory", "hierarchical", "sparse_rows"),
    *("local_sgd", "diloco", "ddp"),
)


def or_choose(option: str) -> str:
    """The end of a sentence that rejects an option for one sync: the registered syncs that take it, if any."""
    takers = [name for name in SYNCS if option in get_sync(name).uses]
    return f", or choose one of {', '.join(takers)}" if takers else ""


def get_sync(name: str, also: Iterable[str] = ()) -> type[GradientSync]:
    """The class of the gradient sync called `name`, or of your own in a file, FILE.py:CLASS.

    Raises UsageError for any other name, with the known names and those in `also`; and for a file that cannot be used,
    with the reason.
    """
    if name in SYNCS:
        file = importlib.import_module(f"cos598d.sync.{name}")
        (found,) = (kind for kind in vars(file).values() if _is_sync_of(kind, file.__name__))
        return found
    from cos598d.terminal.own_code import is_own  # which few runs need

    if is_own(name):
        from cos598d.sync.from_file import load_own

        return load_own(name)
    raise unknown("--sync", name, [*SYNCS, *also])


def unknown(flag: str, name: str, known: Sequence[str]) -> UsageError:
    """The error for a `name` that is not `known`, given for `flag`: with the nearest name, and all of them."""
    from cos598d.terminal.words import did_you_mean  # which only a wrong name needs

    choices = ", ".join(known)
    return UsageError(
        f"unknown {flag} {name}.{did_you_mean(name, known)} Choose one of {choices}, or your own as FILE.py:CLASS."
    )


def _is_sync_of(kind: object, module: str) -> bool:
    return isinstance(kind, type) and issubclass(kind, GradientSync) and kind.__module__ == module
