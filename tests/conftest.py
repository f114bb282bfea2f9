"""What all tests share."""

import gc
import os
import runpy
import signal
import sys
import zlib
from collections import Counter
from multiprocessing.forkserver import set_forkserver_preload
from unittest.mock import patch

import pytest
from programs import NOT_INHERITED, Program, assert_nothing_is_left, free_port, programs_end, script

from cos598d.tools.exam.server import PRELOADED

os.environ.setdefault("OMP_NUM_THREADS", "1")  # many small processes on few cores
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads of runs with two do not spin while they wait
# Every module of tests imports pytest, and so does each rank that runs a function of one. Runs import the others: 0.2 s
# of processor for a summary's intervals, 1.8 s for the digits, and 1.3 s for the models and the loop.
set_forkserver_preload([*PRELOADED, "pytest", "scipy.special", "sklearn.datasets", "cos598d.run"])
# A test run in the background ignores Ctrl-C, and one under nohup ignores SIGHUP. The programs that it starts would
# ignore them, too, except if there is a handler.
signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)


@pytest.fixture(autouse=True, scope="module")
def _module_alone():
    """End what the fixtures of a module start and set, and fail if its tests leave a process."""
    with patch.dict(os.environ), programs_end():
        yield
    assert_nothing_is_left()


@pytest.fixture(autouse=True)
def _test_alone():
    """End what a test starts, and reset the variables that it sets."""
    with patch.dict(os.environ), programs_end():
        yield


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory, monkeypatch):
    """Give every test run its own caches, so that two runs at a time do not share them, and the bundled samples."""
    monkeypatch.setenv("COS598D_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    for name in NOT_INHERITED:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def start(tmp_path):
    """Start programs that end with the test: start(name, words, environ, is_fresh) -> Program."""

    def _start(name, words, environ=None, is_fresh=False):
        return Program(tmp_path, name, [str(word) for word in words], environ, is_fresh)

    return _start


@pytest.fixture
def run_here(tmp_path, monkeypatch, capfd):
    """Run a script in this process: run_here(script, words) -> (exit code, output).

    For errors before ranks meet, and runs of one rank. This process has loaded torch, which takes seconds.
    """
    monkeypatch.chdir(tmp_path)

    def _run(path, words):
        ours = {"argv": [script(path), *map(str, words)], "path": [*sys.path]}
        for name, value in (ours | {"stdout": sys.stdout, "stderr": sys.stderr}).items():
            monkeypatch.setattr(sys, name, value)  # what a script changes is reset after the test
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(script(path), run_name="__main__")
        said = capfd.readouterr()
        return ended.value.code, said.out + said.err

    return _run


@pytest.fixture
def command(run_here):
    """Run a command of ours in this process: command(*words) -> (exit code, output)."""
    return lambda *words: run_here("cos598d/__main__.py", words)


@pytest.fixture
def start_ranks(start):
    """Start the ranks of a script in the four-shell form: start_ranks(script, n, words, by_rank, port).

    `by_rank` gives further words for single ranks. A rank whose words are None is left out.
    """

    def _start(path, world_size, words=(), by_rank=None, port=None):
        port = port or free_port()
        programs = []
        for rank in range(world_size):
            own = (by_rank or {}).get(rank, ())
            if own is None:
                continue
            place = ["--master_ip", "127.0.0.1", "--master_port", port]
            place += ["--world_size", world_size, "--local_rank", rank]
            programs.append(start(f"rank{rank}", [script(path), *place, *words, *own]))
        return programs

    return _start


def pytest_addoption(parser):
    which = "which of the long tests to run: all, none, or a share, from 1/9 to 9/9"
    parser.addoption("--long", type=_share, default="all", help=which)


def _share(words):
    one, of = {"all": "1/1", "none": "0/0"}.get(words, words).split("/")
    return int(one), int(of)


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(config, items):
    """Leave out the long tests that were not requested. Tests that share a module's fixture go to one process."""
    one, of = config.getoption("long")
    seen = Counter()
    wanted, left = [], []
    for item in items:
        definitions = item._fixtureinfo.name2fixturedefs.items()
        shares = any(each[-1].scope == "module" and name != "_module_alone" for name, each in definitions)
        if shares:
            item.add_marker(pytest.mark.xdist_group(item.module.__name__))
        number = zlib.crc32((item.module.__name__ if shares else item.nodeid).encode())
        is_wanted = not _is_long(item, seen) or (of and number % of == one % of)
        (wanted if is_wanted else left).append(item)
    config.hook.pytest_deselected(items=left)
    items[:] = wanted


def _is_long(item, seen):
    """Whether `make test` leaves it out. With `one_in=n`, it keeps the first of each n cases."""
    mark = item.get_closest_marker("long")
    if mark is None:
        return False
    seen[item.function] += 1
    return "one_in" not in mark.kwargs or seen[item.function] % mark.kwargs["one_in"] != 1


def pytest_collection_finish():
    """Keep the collector of garbage from thousands of collected tests and from torch."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)  # xdist's
def pytest_xdist_auto_num_workers(config):
    """Use one test process more than cores, since tests also wait."""
    return None if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ else 1 + (os.cpu_count() or 1)
