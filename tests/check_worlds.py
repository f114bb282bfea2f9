"""Many syncs through check's tests in few worlds: a test's own functions are called for one sync after the other on the
same ranks. Imports check's tests, which `check` starts pytest with."""

from pathlib import Path

from cos598d.tools.check import test_sync
from cos598d.tools.exam.notes import Trace
from cos598d.tools.exam.ranks import World, Wrong, run

SEED = 598  # each check draws another one
SECONDS = 200.0  # that a rank may take for some syncs; times 1 to 4, by the machine's load
TESTS = {name.removeprefix("test_"): test for name, test in vars(test_sync).items() if name.startswith("test_")}


def drive_many(comm, module, names, function, *arguments):
    """On a rank: what `function` returns for each sync, or why it raised."""
    found = {}
    for name in names:
        try:
            found[name] = {"value": function(comm, module, name, *arguments)}
        except Exception as error:
            found[name] = {"raised": f"{type(error).__name__}: {error}"}
    return found


class Together:
    """Runs what a test asks for, for all these syncs at once. Each sync's turn then finds its own values."""

    def __init__(self, names):
        self._names, self._made = names, {}

    def sync_of(self, name):
        """The fixture `sync` for one of them."""

        def sync(n, function, *arguments, **_):
            key = function.__name__, n, repr(arguments)
            if key not in self._made:
                words = (self._names, function, *arguments)
                self._made[key] = run(n, drive_many, *words, file=Path(__file__), loads=False, seconds=SECONDS)
            values = [each[name] for each in self._made[key].values]
            for value in values:
                if "raised" in value:
                    raise Wrong(value["raised"])
            return World(Path(__file__), [Trace() for _ in values], [value["value"] for value in values])

        return sync


def alone(name, file):
    """The fixture `sync` for one sync in worlds of its own, whose calls are judged."""

    def sync(n, function, *arguments, **_):
        return run(n, function, name, *arguments, file=file, loads=False, seconds=SECONDS)

    return sync


def mistake(test, sync, n):
    """What a test says of a sync; "" if it passes."""
    try:
        TESTS[test](sync, SEED, n)
    except Wrong as wrong:
        return f"refused: {wrong.words} {wrong.detail}"
    return ""
