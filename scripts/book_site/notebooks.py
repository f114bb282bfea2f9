"""A notebook for each lesson, which installs the package from a wheel next to it, asks, checks and hints."""

import json
import re
from importlib.metadata import PathDistribution
from pathlib import Path
from zipfile import Path as ZipPath

from cos598d.tools.course import Lesson, all_lessons

TRY = "docs/lessons/try"  # where a site has its notebooks, next to the package's wheel
NEEDS = (
    "You need Linux, Python 3.11 or newer, and in a new environment 1.3 GB of disk and 0.3 GB of downloads. Without a "
    "network, torch and the other packages must be installed already."
)
# The first cell, after the versions. It asks torch's index only for torch. If that cannot be reached, each package that
# is asked for there takes half a minute.
INSTALL = """
import subprocess
import sys


def pip(*words):
    words = [sys.executable, "-m", "pip", "install", "--quiet", *words]
    return subprocess.run(words, capture_output=True, text=True)


done = pip("--no-index", WHEEL)  # enough if all that it needs is there
if done.returncode:
    print("Downloading torch and other packages. This takes some minutes.", flush=True)
    done = pip("--no-deps", "--extra-index-url", "https://download.pytorch.org/whl/cpu", PINNED[0])
    done = done if done.returncode else pip(WHEEL, *PINNED)
if done.returncode:
    sys.exit(f"error: pip could not install {WHEEL}:\\n{done.stderr}\\nSave it next to this notebook, and try again.")
print(f"cos598d is there, in {sys.prefix}.")
"""


def write_notebooks(wheel: Path, constraints: Path) -> dict[str, str]:
    """Write a notebook for each lesson next to `wheel`; it installs packages at the versions of `constraints`.

    Returns by the path of a lesson's page the paragraph that links to its notebook.
    """
    version = wheel.name.split("-")[1]
    needed = PathDistribution(ZipPath(wheel, f"cos598d-{version}.dist-info/")).requires or []
    names = [re.split(r"[<>=]", each)[0].replace("_", "-") for each in needed if ";" not in each]
    pins = dict(re.findall(r"^(.+)==(.+)$", constraints.read_text(encoding="utf-8").replace("_", "-"), re.MULTILINE))
    facts = f'WHEEL = "{wheel.name}"\nPINNED = [' + "".join(f'\n    "{name}=={pins[name]}",' for name in names) + "\n]"
    offers = {}
    for lesson in all_lessons():
        name = f"lesson{lesson.number}"
        (wheel.parent / f"{name}.ipynb").write_text(notebook(lesson, facts), encoding="utf-8")
        offers[f"docs/lessons/{name}.md"] = (
            f"**Try it in a notebook:** save [{name}.ipynb](try/{name}.ipynb) and [the package](try/{wheel.name}) in a "
            f"folder of your own, and run the notebook's cells in Jupyter. {NEEDS}"
        )
    return offers


def notebook(lesson: Lesson, facts: str) -> str:
    """A lesson's notebook as JSON. Each cell of code needs no other one to have run, so that it also runs after the
    kernel is restarted."""
    number, file = lesson.number, lesson.file_name
    command = f'import sys\n\n!"{{sys.executable}}" -m cos598d learn {number}'
    forms = "\n".join(f"    {form}" for form in lesson.contract.values())
    cells = [
        f"# Lesson {number}: {lesson.title}\n\nRun the cells from top to bottom. {NEEDS}\n\nThe first cell installs "
        "the package into this notebook's Python, and what it needs if that is missing.",
        f"{facts}\n{INSTALL}",
        f"{lesson.question}\n\nIt takes about {lesson.minutes} minutes. Your file has to define\n\n{forms}\n\n"
        f"[The lesson's page](../lesson{number}.html) has pictures and numbers. The link works within the site's "
        f"folder. Elsewhere, open `docs/lessons/lesson{number}.html` of the site.\n\n"
        f"Write your code in the next cell instead of `...`. The cell replaces `{file}` in this folder, so keep no "
        f"other work under that name. The check prints line numbers of `{file}`. In the cell each is one more.",
        f"%%writefile {file}\n{lesson.page().rstrip()}",
        f"Check it. This prints what `cos598d learn {number} --check` prints:",
        f"{command} --check",
        "A hint, one more each time:",
        f"{command} --hint",
    ]
    kinds = ["code" if re.match(r"WHEEL|%%|import", cell) else "markdown" for cell in cells]
    return json.dumps(
        {
            "cells": [
                {"cell_type": kind, "id": f"cell{place}", "metadata": {}, "source": cell.rstrip("\n")}
                | ({"execution_count": None, "outputs": []} if kind == "code" else {})
                for place, (kind, cell) in enumerate(zip(kinds, cells, strict=True))
            ],
            "metadata": {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}},
            "nbformat": 4,
            "nbformat_minor": 5,
        },
        indent=1,
    )
