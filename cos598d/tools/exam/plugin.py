"""pytest's side of an exam: the fixtures `ranks` and `seed`, each failure as one sentence with its line, and points.

The tests are plain functions of a file of ours: a lesson's, or check's. `--file` names the file under test.
"""

import json
import secrets
import textwrap
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

from cos598d.tools.exam.ranks import World, Wrong, run
from cos598d.tools.exam.source import first_blank, torch_calls

WIDTH = 118
MOST_OUTPUT = 20_000  # letters of a test's output in results.json


def pytest_addoption(parser: pytest.Parser) -> None:
    """The flags of an exam."""
    group = parser.getgroup("exam")
    group.addoption("--file", type=Path, help="the file under test")
    group.addoption("--seed", type=int, default=None, help="the seed of what is drawn (default: a new one)")
    group.addoption("--results", type=Path, help="write Gradescope's results.json, again after each test")
    group.addoption("--visibility", default="visible", help="of the results on Gradescope")
    group.addoption("--points", type=json.loads, default={}, help='points by test, as JSON; "default" for the others')


def pytest_configure(config: pytest.Config) -> None:
    """Keep results if they are asked for."""
    config.addinivalue_line("markers", "calls_torch: the file may call torch.distributed itself")
    if config.getoption("--results"):
        words = (config.getoption(f"--{name}") for name in ("results", "points", "visibility"))
        config.pluginmanager.register(Results(*words))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that names no numbers of ranks `n` runs on those of `--sizes`, which check has, else on one."""
    named = [mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")]
    if "n" in metafunc.fixturenames and "n" not in named:
        sizes = metafunc.config.getoption("--sizes", "1")
        metafunc.parametrize("n", [int(size) for size in sizes.split(",")])


class Results:
    """Gradescope's results.json: a test passes if it does on every number of ranks. It is written after each test, so
    that a file that ends the grader has a result too."""

    def __init__(self, path: Path, points: dict[str, float], visibility: str):
        self._path, self._points, self._visibility, self._began = path, points, visibility, time.monotonic()
        self._tests: dict[str, dict[str, Any]] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Note each test and its points; a test counts once, however many numbers of ranks it has."""
        for item in items:
            name = _name(item.name)
            most = self._points.get(name, self._points.get("default", 1))
            entry = {"name": name, "max_score": most, "score": most, "status": "passed", "output": "", "left": 0}
            self._tests.setdefault(name, entry)["left"] += 1
        self.write()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A part of a test has ended."""
        test = self._tests[_name(report.location[2])]
        test["left"] -= report.when == "call" or report.failed
        if report.failed and test["status"] == "passed":
            test.update(status="failed", score=0, output=_short(report))
        self.write()

    def write(self) -> None:
        """Write the file, complete or not at all. A test that has not ended yet has no points."""
        late = {"score": 0, "status": "failed", "output": "not judged in time"}
        tests = [test if test["left"] <= 0 or test["output"] else test | late for test in self._tests.values()]
        about = {"output_format": "text", "visibility": self._visibility}
        shown = [{key: value for key, value in (test | about).items() if key != "left"} for test in tests]
        results = {
            "score": sum(test["score"] for test in tests),
            "execution_time": round(time.monotonic() - self._began, 1),
            "output": next((test["output"] for test in tests if test["output"]), ""),
            "output_format": "text",
            "visibility": self._visibility,
            "stdout_visibility": "hidden",
            "tests": shown,
        }
        beside = self._path.with_suffix(".part")
        beside.write_text(json.dumps(results))
        beside.replace(self._path)


def _short(report: pytest.TestReport) -> str:
    """A failure in results.json: our sentence, or the last lines of pytest's."""
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(crash.message if crash else report.longrepr)[:MOST_OUTPUT]


def _name(test: str) -> str:
    """A test's name in results.json: without its number of ranks, which are one test."""
    name, _, which = test.removeprefix("test_").partition("[")
    which = which.rstrip("]")
    return name if not which or which.isdigit() else f"{name}_{which}"


@pytest.fixture(scope="session")
def seed(request: pytest.FixtureRequest) -> int:
    """The seed of everything that is drawn: a new one in each session, so that no file can know the answers."""
    given = request.config.getoption("--seed")
    return secrets.randbits(32) if given is None else given


@pytest.fixture(scope="session")
def ranks(request: pytest.FixtureRequest) -> Callable[..., World]:
    """`ranks(n, function, ...)` is `exam.ranks.run` with the file under test. Raises Wrong for a file that cannot be
    tried: one that is no Python, has blanks, or makes calls past the communicator."""
    file: Path = request.config.getoption("--file")
    may_call_torch = any(item.get_closest_marker("calls_torch") for item in request.session.items)
    check_text(file, may_call_torch)
    never_ended: list[Wrong] = []

    def on_ranks(*words: Any, **options: Any) -> World:
        if never_ended:  # once is enough to wait for
            raise never_ended[0]
        try:
            return run(*words, file=file, **options)
        except Wrong as wrong:
            if " did not end" in wrong.words:
                never_ended.append(wrong)
            raise

    return on_ranks


def check_text(file: Path, may_call_torch: bool = False) -> None:
    """Raise Wrong for a file that cannot be tried as it stands."""
    source = file.read_text(encoding="utf-8", errors="replace")
    try:
        compile(source, str(file), "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        why = getattr(error, "msg", error)
        raise Wrong(f"this is not valid Python ({why})", getattr(error, "lineno", 0) or 0) from None
    if blank := first_blank(source):
        raise Wrong("this blank is still to be filled in: write your code instead of `...`", blank)
    direct = None if may_call_torch else torch_calls(source)
    if direct:
        line, name = direct
        told = f"torch.distributed is called directly ({name} in line {line}): make every call through comm"
        raise Wrong(told, line)


def in_words(wrong: Wrong, file: Path) -> str:
    """A mistake as a person reads it: the file and line, the sentence, then the numbers."""
    where = f"{file.name} line {wrong.line}" if wrong.line else file.name
    lines = textwrap.fill(f"{where}: {wrong.words}", WIDTH, subsequent_indent="  ", break_long_words=False)
    return "\n".join(filter(None, [lines, wrong.detail]))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, None]:
    """A mistake is shown as its sentence, without a traceback."""
    outcome = yield
    error = call.excinfo.value if call.excinfo else None
    if isinstance(error, Wrong):
        outcome.get_result().longrepr = in_words(error, item.config.getoption("--file"))
