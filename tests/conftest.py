"""What all tests share."""

import os
import signal

import pytest
from programs import Program, free_port, script

os.environ.setdefault("OMP_NUM_THREADS", "1")  # many small processes on few cores
EXPENSIVE = {"lessons", "finished"}  # fixtures of a module that train
# A test run started in the background ignores Ctrl-C, and so would the programs that it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory, monkeypatch):
    """Every test run keeps its caches to itself, so that two runs side by side do not meet."""
    monkeypatch.setenv("COS598D_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture
def start(tmp_path):
    """Start programs that end with the test: start(name, words, environ) -> Program."""
    started = []

    def _start(name, words, environ=None):
        started.append(Program(tmp_path, name, [str(word) for word in words], environ))
        return started[-1]

    yield _start
    for program in started:
        program.stop()


@pytest.fixture
def start_ranks(start):
    """Start the ranks of a script in the four-shell form: start_ranks(script, n, words, by_rank) -> [Program].

    `by_rank` gives the further words of single ranks; a rank whose words are None is left out.
    """

    def _start(path, world_size, words=(), by_rank=None, port=None):
        port = port or free_port()
        programs = []
        for rank in range(world_size):
            own = (by_rank or {}).get(rank, ())
            if own is None:
                continue
            place = [
                "--master_ip",
                "127.0.0.1",
                "--master_port",
                port,
                "--world_size",
                world_size,
                "--local_rank",
                rank,
            ]
            programs.append(start(f"rank{rank}", [script(path), *place, *words, *own]))
        return programs

    return _start


@pytest.fixture
def servers(monkeypatch):
    """Rank 0's servers that are opened in this process; they end with the test, and no interface is chosen for it."""
    from cos598d.world import rendezvous

    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    made = []

    class Kept(rendezvous.AdmissionServer):
        def start(self):
            made.append(self)
            super().start()

    monkeypatch.setattr(rendezvous, "AdmissionServer", Kept)
    yield made
    for server in made:
        server.stop()


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items):
    """With several test processes, tests that share an expensive fixture go to the same one."""
    for item in items:
        if EXPENSIVE.intersection(item.fixturenames):
            item.add_marker(pytest.mark.xdist_group(item.module.__name__))
