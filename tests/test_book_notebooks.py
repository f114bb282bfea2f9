"""The site's notebooks: each installs the package from the wheel next to it, and checks its lesson as `learn` does."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata

import pytest
from book_site.notebooks import write_notebooks
from make_book import ROOT, build_wheel
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from cos598d.tools.course import NUMBERS, get_lesson


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The notebooks of all lessons, with the wheel."""
    place = tmp_path_factory.mktemp("try")
    write_notebooks(build_wheel(ROOT, place), ROOT / "constraints.txt")
    return place


def closure(names, found=None):
    """The installed distributions that these need, with themselves, by name."""
    found = {} if found is None else found
    for words in names:
        asked = Requirement(words)
        name = canonicalize_name(asked.name)
        if name not in found and (asked.marker is None or asked.marker.evaluate({"extra": ""})):
            found[name] = metadata.distribution(name)
            closure(found[name].requires or [], found)
    return found


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """The Python of an environment with what the package needs, and without the package; in a folder with a space."""
    place = tmp_path_factory.mktemp("two words") / "environment"
    subprocess.run([sys.executable, "-m", "venv", place], check=True)
    (packages,) = place.glob("lib/python*/site-packages")
    for path in set(packages.iterdir()) - set(packages.glob("pip*")):  # an older setuptools, with older Pythons
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    needed = [each for each in metadata.requires("cos598d") if "extra ==" not in each]
    for each in closure([*needed, "ipykernel"]).values():
        for top in {file.parts[0] for file in each.files} - {"..", "__pycache__"}:
            (packages / top).symlink_to(each.locate_file(top))
    return place / "bin" / "python"


@pytest.fixture
def offline(monkeypatch):
    """No index for pip, and no way to the package except its installation."""
    for name in ("PYTHONPATH", "PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)


def notebook_of(folder, number):
    return json.loads((folder / f"lesson{number}.ipynb").read_text(encoding="utf-8"))


def cell_with(notebook, words):
    """The one cell of code with these words, apart from the lesson's file, which names flags in its comments."""
    cells = [each for each in notebook["cells"] if each["cell_type"] == "code" and words in each["source"]]
    (found,) = (each for each in cells if each["source"].startswith("%%") == words.startswith("%%"))
    return found


@pytest.mark.parametrize("number", NUMBERS)
def test_every_lesson_has_a_notebook_with_its_page_s_task(folder, number):
    lesson, notebook = get_lesson(number), notebook_of(folder, number)
    pytest.importorskip("nbformat", reason="needs the notebook extra").validate(notebook)
    page = f"%%writefile lesson{number}.py\n{lesson.page()}".rstrip()
    assert cell_with(notebook, "%%writefile")["source"] == page
    for flag in ("--check", "--hint"):
        assert cell_with(notebook, flag)["source"].endswith(f"-m cos598d learn {number} {flag}")
    text = "".join(each["source"] for each in notebook["cells"] if each["cell_type"] == "markdown")
    assert all(words in text for words in [lesson.question, *lesson.contract.values(), f"(../lesson{number}.html)"])


def test_the_wheel_has_all_files_and_notebooks_pin_the_package_s_needs(folder):
    (wheel,) = folder.glob("*.whl")
    within = set(zipfile.ZipFile(wheel).namelist())
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / "cos598d").rglob("*") if path.is_file()}
    assert {file for file in files if "__pycache__" not in file} - within == set()
    facts = {}
    exec(cell_with(notebook_of(folder, 3), "PINNED")["source"].partition("\n\n")[0], facts)
    pinned = [Requirement(words) for words in facts["PINNED"]]
    needed = [Requirement(words) for words in metadata.requires("cos598d") if ";" not in words]
    assert [each.name.replace("_", "-") for each in needed] == [each.name for each in pinned]
    assert pinned[0].name == "torch"
    for each in pinned:
        version = metadata.version(each.name)
        assert each.specifier.contains(version)


@pytest.mark.long
@pytest.mark.xdist_group("try")
def test_a_notebook_installs_the_package_and_checks_the_blanks_and_the_answer(
    folder, environment, offline, tmp_path, monkeypatch
):
    for package in ("nbclient", "ipykernel"):
        pytest.importorskip(package, reason="needs the notebook extra")
    import nbformat
    from nbclient import NotebookClient
    from traitlets.config import Config

    kernel = tmp_path / "jupyter" / "kernels" / "try" / "kernel.json"
    kernel.parent.mkdir(parents=True)
    words = [str(environment), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    kernel.write_text(json.dumps({"argv": words, "display_name": "try", "language": "python"}))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    mine = tmp_path / "my lessons"
    mine.mkdir()
    shutil.copy(next(folder.glob("*.whl")), mine)
    monkeypatch.chdir(mine)

    def run(cells):
        """What each of these cells prints in a kernel of their own, and the number of pictures that they show."""
        notebook = nbformat.from_dict(notebook_of(folder, 3) | {"cells": cells})
        private = Config({"AsyncKernelManager": {"transport": "ipc"}})
        NotebookClient(notebook, config=private, kernel_name="try", timeout=240).execute()
        outputs = [cell.get("outputs", []) for cell in notebook.cells]
        return ["".join(one.get("text", "") for one in each).replace("\r", "") for each in outputs]

    lesson, notebook = get_lesson(3), notebook_of(folder, 3)
    install, write, check, hint = (
        cell_with(notebook, words) for words in ("PINNED", "%%writefile", "--check", "--hint")
    )
    first, again, _, checked, hinted = run([install, install, write, check, hint])
    assert str(environment.parents[1]) in first
    assert again == first
    blank = lesson.page().splitlines().index("    ...  # your turn") + 1
    assert f"lesson3.py line {blank}: this blank is still to be filled in" in checked
    assert lesson.hints[0] in hinted
    assert (mine / "lesson3.py").read_text().startswith(lesson.page().rstrip())  # then a line of the hints

    write["source"] = f"%%writefile lesson3.py\n{lesson.answer()}"
    _, checked = run([write, check])  # in a new kernel, without the first cell
    assert "lesson3.py passes all tests of lesson 3." in checked


def test_an_install_cell_that_cannot_install_is_an_error_with_the_reason(folder, offline, tmp_path):
    source = cell_with(notebook_of(folder, 3), "PINNED")["source"]
    done = subprocess.run([sys.executable, "-c", source], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "error: pip could not install cos598d" in done.stderr
    assert "Save it next to this notebook" in done.stderr
