"""One submission: pytest judges it in a process of its own, within limits, or in a container.

What the limits do not stop: without a container a submission has your rights. It can read your files, use the network,
and write where you can. Grade a class in a container, or on a platform that makes one.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cos598d.errors import UsageError
from cos598d.tools.grade.assignment import Assignment

PASSED_ON = ("PATH", "LANG", "LC_ALL", "VIRTUAL_ENV", "PYTHONPATH", "HOME", "HF_HOME")
KEEPER = "cos598d.tools.grade.keeper"
LOOK_SECONDS = 0.1
LONGEST = 500  # letters of what pytest said
MEMORY, PROCESSES = "8g", 300  # of a container
ENDED = "the grader was ended before anything was judged"
LATE, BROKEN = "not judged within {seconds:g} seconds", "the tests left no results: {why}"
REMARK = (
    "without --container a submission has your rights: it can read your files, use the network and write where you can"
)


def judge(
    submission: Path, assignment: Assignment, container: str = "", stop: threading.Event | None = None
) -> dict[str, Any]:
    """The results of a file, as Gradescope's results.json. Tests that did not end in time, or until `stop`, have no
    points."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.json"
        words = [*assignment.words(submission.resolve()), "--results", str(results)]
        words += ["--points", json.dumps(assignment.points), "--visibility", assignment.visibility]
        python = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", folder, *words]
        command = [sys.executable, *python]
        if container:
            command = _in_container(container, ["python3", *python], submission.resolve().parent, Path(folder))
        output = Path(folder) / "output"
        is_late = _run(command, folder, output, assignment.seconds, stop or threading.Event())
        found = _read(results)
        if not found["tests"]:
            lines = output.read_text(errors="replace").splitlines() if output.exists() else []
            broken = BROKEN.format(why=" / ".join(lines[-3:])[:LONGEST])
            found["output"] = LATE.format(seconds=assignment.seconds) if is_late else broken
        return found


def _in_container(image: str, command: Sequence[str], source: Path, folder: Path) -> list[str]:
    """The command that runs it in a container, without a network, which can write only its results."""
    program = next((name for name in ("docker", "podman") if shutil.which(name)), None)
    if program is None:
        raise UsageError(f"--container {image} needs docker or podman, and neither is installed. Leave it out.")
    mounts = [f"--volume={source}:{source}:ro", f"--volume={folder}:{folder}:rw"]
    limits = ["--network=none", f"--memory={MEMORY}", f"--pids-limit={PROCESSES}", "--env=OMP_NUM_THREADS=1"]
    return [program, "run", "--rm", "--init", *limits, *mounts, image, *command]


def _run(command: Sequence[str], folder: str, output: Path, seconds: float, stop: threading.Event) -> bool:
    """Run it to its end, to the end of its time, or to `stop`, and end all that it has started. Whether it was late."""
    environment = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    environment |= {"OMP_NUM_THREADS": "1", "TMPDIR": folder}
    with output.open("wb") as written:
        process = subprocess.Popen(
            [sys.executable, "-m", KEEPER, folder, *command],
            env=environment,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=written,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        deadline = time.monotonic() + seconds
        try:
            while process.poll() is None and time.monotonic() < deadline and not stop.wait(LOOK_SECONDS):
                pass
            return process.poll() is None
        finally:
            process.terminate()
            process.wait()


def _read(results: Path) -> dict[str, Any]:
    try:
        found = json.loads(results.read_text(encoding="utf-8"))
        if isinstance(found, dict) and isinstance(found.get("tests"), list) and "score" in found:
            return found
    except (OSError, ValueError):
        pass
    return {"score": 0, "output": ENDED, "tests": []}
