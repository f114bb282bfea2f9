"""A short round of damaged files over all commands that read some; `python scripts/fuzz.py` has the long one."""

import pytest

pytest.importorskip("jinja2", reason="pages are an extra: pip install -e '.[report]' in the project's folder")
pytest.importorskip("matplotlib", reason="pages are an extra: pip install -e '.[report]' in the project's folder")
import fuzz  # noqa: E402 - it makes records with the packages above


def test_every_command_takes_a_damaged_file_or_gives_one_error():
    found, summary = fuzz.play(200, seed=3)
    assert not found, f"{summary}\npython scripts/fuzz.py --seed 3 --only N: {found}"


def test_fuzzing_reports_an_exception_that_is_no_error_message(monkeypatch):
    monkeypatch.setattr(fuzz, "make_cases", lambda folder: [("broken", _folder(folder), _breaks)])
    found, _ = fuzz.play(5, seed=1)
    assert list(found.values()) == [[0, 1, 2, 3, 4]]
    assert "ZeroDivisionError" in next(iter(found))


def _folder(folder):
    place = folder / "one"
    place.mkdir()
    (place / "file.json").write_text("{}")
    return place


def _breaks(_):
    return 1 / 0
