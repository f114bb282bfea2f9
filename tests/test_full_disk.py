"""A full disk at any write: the record is complete or not there, and an older one stays until then."""

import errno
import json
import os

import pytest
from full_disk import needs_small_disks, on_small_disk
from programs import TINY
from scale_records import write_bench

from cos598d.commands.bench import _deliver
from cos598d.errors import UserError

RUN = """
import contextlib, io, shutil
from cos598d.commands.script import run_script

def run(*more):
    says = io.StringIO()
    with contextlib.redirect_stderr(says), contextlib.redirect_stdout(io.StringIO()):
        words = [*values["words"], "--output_dir", "run", *more]
        code = run_script("task1", "none", words, single_process=True)
    return code, says.getvalue().strip().splitlines()

def files():
    return {str(path.relative_to("run")): path.stat().st_mtime_ns for path in Path("run").rglob("*") if path.is_file()}

def try_again(kilobytes, seed, *more):
    shutil.rmtree("run/live", ignore_errors=True)  # else what it held would be room too
    leave(kilobytes)
    before = files()
    code, says = run("--seed", str(seed), "--overwrite_output_dir", *more)
    Path("filler").unlink()
    now = files()
    changed = sorted(name for name in {*before, *now} if before.get(name) != now.get(name) and "live/" not in name)
    live = sorted(name for name in now if "live/" in name)
    record = json.loads(Path("run/summary.json").read_text())
    return {"room": kilobytes, "code": code, "says": says, "seed": record["seed"], "changed": changed, "live": live}

code, says = run("--seed", "1")
assert code == 0, says
found = []
while not found or "summary.json" not in found[-1]["says"][0]:
    room = values["step"] * len(found)
    found.append(try_again(room, 100 + room, "--no_save_model"))
found.append(try_again(values["room_without_model"], 2))
found.append(try_again(values["room_for_all"], 3))
found.append({"left": [name for name in os.listdir("run") if name.startswith(".")]})
"""


@pytest.mark.long
@needs_small_disks
def test_a_file_that_does_not_fit_is_named_and_one_record_is_complete(tmp_path):
    *small, without_model, with_all, end = on_small_disk(
        tmp_path / "disk",
        "64m",
        RUN,
        words=[*TINY, "--do_train", "--max_steps", "3"],
        step=4,
        room_without_model=200,
        room_for_all=30_000,
    )
    for one in small:
        (sentence,) = one["says"]
        assert one["code"] == 1
        assert "cannot be written (No space left on device)" in sentence
        assert "Make room there" in sentence
        assert "an earlier run's files are still there." in sentence
        assert (one["seed"], one["changed"]) == (1, []), one
    named = [one["says"][0].removeprefix("error: ").split()[0] for one in small]
    assert len(named) > 5
    assert named[0] == "run/live/attempts.json", "the first"
    assert named[-1] == "run/summary.json", "the last that was written"
    for one, name in zip(small, named, strict=True):
        has_begun = "This run's rows so far stay in run/live" in one["says"][0]
        assert has_begun or "Nothing of this run is in run, and" in one["says"][0]
        assert has_begun == bool(one["live"]), (name, one)

    (sentence,) = without_model["says"]
    assert sentence.startswith("error: the model cannot be saved as run/model ("), sentence
    assert "No space left on device" in sentence
    assert "The run's other files in run are complete, and the model there is still an earlier run's." in sentence
    assert (without_model["code"], without_model["seed"]) == (1, 2)
    assert not [name for name in without_model["changed"] if name.startswith("model")]

    assert (with_all["code"], with_all["seed"], with_all["says"]) == (0, 3, [])
    assert not with_all["live"]
    assert "model/pytorch_model.bin" in with_all["changed"]
    assert end["left"] == []


def test_a_bench_whose_record_does_not_fit_is_printed_instead(tmp_path, monkeypatch, capsys):
    record = json.loads((write_bench(tmp_path / "bench", syncs="flat") / "bench.json").read_text())
    record["setting"] |= {"attach": "once"}
    # As a full disk refuses it.
    monkeypatch.setattr("cos598d.terminal.files.os.replace", no_room)
    with pytest.raises(
        UserError, match=r"to .*out/bench.json \(No space left on device\), so they were printed instead"
    ):
        _deliver(record, tmp_path / "out", None)
    assert "ratio to ddp" in capsys.readouterr().out
    assert list((tmp_path / "out").iterdir()) == []


def no_room(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


REPORT = """
import contextlib, io
from cos598d.commands.cli import main
import report_records

def files():
    return {path.name: path.read_text() for path in place.rglob("*") if path.suffix in (".md", ".svg", ".html")}

run = report_records.write_run(place / "run")
found = []
for form in ("md", "html"):
    assert main(["report", str(run), "-o", f"page.{form}"]) == 0
before = files()
other = report_records.write_run(place / "other", seconds=[3.0, 1.0, 4.0, 1.0, 5.0])
for form in ("md", "html"):
    for kilobytes in values["rooms"]:
        leave(kilobytes)
        says = io.StringIO()
        with contextlib.redirect_stderr(says):
            code = main(["report", str(other), "-o", f"page.{form}"])
        (place / "filler").unlink()
        found.append({"code": code, "says": says.getvalue(), "unchanged": files() == before})
found.append(sorted(path.name for path in place.rglob(".*")))
"""


@pytest.mark.long
@needs_small_disks
def test_a_page_that_does_not_fit_leaves_the_earlier_page_and_its_plots(tmp_path):
    pytest.importorskip("jinja2")
    pytest.importorskip("matplotlib")
    *tries, left = on_small_disk(tmp_path / "disk", "16m", REPORT, rooms=[0, 8, 40])
    assert len(tries) == 6
    for one in tries:
        assert one["code"] == 1
        assert "cannot be written (No space left on device)" in one["says"]
        assert "Make room there" in one["says"]
        assert one["says"].count("\n") == 1
        assert one["unchanged"], one
    assert left == []


DOWNLOAD = """
import download_mirror
from cos598d.errors import UserError

found, data = [], place / "data"
data.mkdir()
with download_mirror.serving() as mirror:
    mirror.files["Tiny-clean.zip"], mirror.versions["Tiny-clean.zip"] = download_mirror.ARCHIVE, '"one"'
    for kilobytes in values["rooms"]:
        leave(kilobytes)
        try:
            download_mirror.get(mirror, data)
            download_mirror.assert_is_tiny(data)
            found.append("whole")
        except UserError as error:
            target = data / "Tiny"
            found.append({"says": str(error), "target": target.exists(), "left": download_mirror.left_in(data)})
        (place / "filler").unlink()
found.append([ranged for _, ranged in mirror.asked])
"""


@needs_small_disks
def test_a_download_that_does_not_fit_leaves_no_half_data_and_resumes_later(tmp_path):
    # The archive has some 80 KB, what is in it 290.
    *short, whole, asked = on_small_disk(tmp_path / "disk", "4m", DOWNLOAD, rooms=[0, 32, 200, 2000])
    for one in short:
        assert "cannot be put into" in one["says"]
        assert "No space left on device" in one["says"]
        assert not one["target"]
        assert all(name.endswith(".part") for name in one["left"]), one
    assert whole == "whole"
    assert asked[-1] is not None, "what had arrived was taken up"
