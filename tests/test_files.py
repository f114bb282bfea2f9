"""Files and folders appear whole or not at all, also when the process ends while one takes its name."""

import pytest

from cos598d.terminal import files
from cos598d.terminal.files import remove_unfinished, whole_folder


def end_meanwhile(folder):
    with whole_folder(folder) as beside:
        for name in ("manifest", "weights"):
            (beside / name).write_text("whole")
        remove_unfinished()


def test_a_folder_that_is_being_removed_can_no_longer_take_its_name(tmp_path, monkeypatch):
    """The watchdog's thread ends the process while another is about to rename what it has written."""
    monkeypatch.setattr(files.shutil, "rmtree", lambda place, **_: (place / "manifest").unlink(missing_ok=True))
    with pytest.raises(FileNotFoundError):
        end_meanwhile(tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_what_is_unfinished_is_gone_at_the_end(tmp_path):
    with pytest.raises(FileNotFoundError):
        end_meanwhile(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []
