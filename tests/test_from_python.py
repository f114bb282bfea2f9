"""Training from Python: runs, comparisons, errors before a process starts, Ctrl-C, and the tour notebook."""

import json
import os
import re
import signal

import pytest
from programs import ROOT, children_of, is_alive, wait_until

import cos598d
from cos598d.errors import UsageError, UserError

TINY = {"model": "tiny", "max_steps": 3, "max_seq_length": 32, "total_train_batch_size": 16, "save_model": False}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run of one rank, and runs of two by gather and scatter and by a ring."""
    folder = tmp_path_factory.mktemp("from_python")
    one, *two = (
        cos598d.train(sync=sync, world_size=ranks, quiet=True, output_dir=folder / f"{sync}<b>", **TINY)
        for sync, ranks in (("none", 1), ("gather_scatter", 2), ("ring", 2))
    )
    return one, *two


@pytest.mark.long
def test_run_has_losses_seconds_and_bytes_of_each_tensor(runs):
    one, gathered, ring = runs
    for run in runs:
        rows = [json.loads(row) for row in (run.folder / "iterations.rank0.jsonl").read_text().splitlines()]
        assert run.losses == [row["loss"] for row in rows]
        assert run.seconds == [row["seconds"] for row in rows]
        assert run.summary["losses"] == run.losses
    assert gathered.losses == pytest.approx(one.losses, abs=1e-5)
    assert sum(sum(sent) for sent in one.bytes.values()) == 0
    for run in (gathered, ring):
        by_rank = [sum(sent) for sent in zip(*run.bytes.values(), strict=True)]
        assert [pytest.approx(each) for each in run.summary["bytes_sent_per_iteration"]] == by_rank
    assert gathered.bytes["bert.embeddings.word_embeddings.weight"][0] > 0
    # With two ranks (n-1) S, which rank 0 sends in gather and scatter, is a ring's 2(n-1)/n S.
    assert sum(gathered.bytes[name][0] for name in gathered.bytes) == sum(sent[0] for sent in ring.bytes.values())


@pytest.mark.long
def test_comparison_names_runs_and_escapes_html(runs):
    one, gathered, ring = runs
    shown = cos598d.compare(one, str(gathered.folder), ring)
    for name in ("none-n1", "gather_scatter-n2", "ring-n2"):
        assert name in repr(shown)
        assert f"<td>{name}</td>" in shown._repr_html_()
        assert name in shown.table()
    assert "mine" in repr(cos598d.compare(one, mine=ring))
    assert repr(cos598d.compare([one, str(gathered.folder)], ring)) == repr(shown), "a list counts as its runs"
    for given in (3, [one, None], {"mine": ring}):
        with pytest.raises(UsageError, match="Give what train.. returned, or a run's folder"):
            cos598d.compare(given)
    twice = cos598d.compare(ring, ring)._repr_html_()
    assert "ring&lt;b&gt;" in twice
    assert "<b>" not in twice
    pytest.importorskip("matplotlib", reason="needs the report extra")
    plots = shown.plot()
    assert len(plots) == 2
    assert plots._repr_html_().count('src="data:image/svg+xml;base64,') == 2


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"syncs": "ring"}, ["'syncs'", "Did you mean 'sync'"]),
        ({"sync": "rng"}, ["rng", "ring"]),
        ({"max_steps": "5"}, ["max_steps='5'", "int"]),
        ({"save_model": 1}, ["save_model=1", "bool"]),
        ({"world_size": 0}, ["world_size=0"]),
        ({"total_train_batch_size": 0}, ["--total_train_batch_size 0"]),
        ({"task": "rtf"}, ["rtf", "rte"]),
    ],
)
def test_wrong_arguments_are_refused_before_anything_starts(given, words, tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(UsageError) as error:
        cos598d.train(**{"output_dir": folder, **given})
    assert all(word in str(error.value) for word in words)
    assert not folder.exists()


@pytest.mark.long
def test_failed_run_raises_its_ranks_error_and_compare_needs_a_run(runs, tmp_path):
    with pytest.raises(UserError, match=f"{re.escape(str(runs[0].folder))} is not empty"):
        cos598d.train(world_size=2, quiet=True, output_dir=runs[0].folder, **TINY)
    with pytest.raises(UserError, match="nowhere"):
        cos598d.compare(tmp_path / "nowhere")
    with pytest.raises(UsageError):
        cos598d.compare()


@pytest.mark.long
def test_ctrl_c_ends_the_ranks(start, tmp_path):
    setting = TINY | {"max_steps": 100000, "world_size": 2, "output_dir": str(tmp_path / "run")}
    (tmp_path / "long.py").write_text(f"import cos598d\ncos598d.train(**{setting})\n")
    program = start("long", [tmp_path / "long.py"], {"PYTHONPATH": str(ROOT)}, is_fresh=True)
    program.wait_for("iteration 2: loss")
    below = children_of(program.process.pid)
    assert below
    os.kill(program.process.pid, signal.SIGINT)
    assert program.wait() == -signal.SIGINT
    assert "KeyboardInterrupt" in program.text
    wait_until(lambda: not any(map(is_alive, below)))


@pytest.mark.long
def test_tour_notebook_runs_from_first_cell_to_last(tmp_path, monkeypatch):
    for package in ("nbclient", "ipykernel", "matplotlib"):
        pytest.importorskip(package, reason="needs the notebook and report extras")
    import nbformat
    from nbclient import NotebookClient
    from traitlets.config import Config

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("PATH", os.defpath)  # without the `cos598d` command: the environment need not be activated
    notebook = nbformat.read(ROOT / "examples" / "tour.ipynb", as_version=4)
    nbformat.validate(notebook)
    model = next(cell for cell in notebook.cells if 'MODEL = "minilm"' in cell.source)
    model.source = model.source.replace('MODEL = "minilm"', 'MODEL = "tiny"')
    for cell in notebook.cells:  # as small as it goes: each rank of its runs loads torch
        cell.source = cell.source.replace("world_size=4", "world_size=2")
    # Sockets in a folder, which nobody else can reach.
    private = Config({"AsyncKernelManager": {"transport": "ipc"}})
    done = NotebookClient(notebook, config=private, kernel_name="python3", timeout=300).execute()
    shown = [output for cell in done.cells for output in cell.get("outputs", [])]
    tables = [each["data"]["text/html"] for each in shown if "<table>" in each.get("data", {}).get("text/html", "")]
    assert [name for name in ("task1", "task2a", "task2b", "task3") if name not in tables[0]] == []
    assert "my_sync.py:MySync" in tables[1]
    assert any("image/svg+xml" in each.get("data", {}) for each in shown)
