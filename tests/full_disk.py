"""Programs on a disk that is full, in a mount namespace of their own: nothing of it outlives them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MOUNT = 'mount -t tmpfs -o size="$1" none "$2" && shift && cd "$1" && shift && exec "$@"'


def has_small_disks() -> bool:
    """Whether this user may mount a file system where nobody else sees it."""
    try:
        done = subprocess.run(
            ["unshare", "--mount", "sh", "-c", "mount -t tmpfs none /mnt"], capture_output=True, check=False
        )
    except OSError:
        return False
    return done.returncode == 0


needs_small_disks = pytest.mark.skipif(not has_small_disks(), reason="needs root, to mount a small disk")


def on_small_disk(place: Path, size: str, code: str, **values: object) -> dict:
    """What `code` leaves in its variable `found`, run as a program of its own where `place` is a disk of `size`.

    The code knows `place`, `values`, and `leave(kilobytes)`, which fills the disk until only so much is free.
    """
    head = f"""
import json, os
from pathlib import Path
place = Path.cwd()
values = json.loads({json.dumps(json.dumps(values))})

def leave(kilobytes):
    filler = place / "filler"
    filler.unlink(missing_ok=True)
    disk = os.statvfs(place)
    with filler.open("wb") as output:
        output.truncate(0)
        os.posix_fallocate(output.fileno(), 0, max(1, disk.f_bavail * disk.f_frsize - 1024 * kilobytes))
"""
    tail = "\nprint('found:' + json.dumps(found))\n"
    place.mkdir(exist_ok=True)
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", MOUNT, "sh", size, place, sys.executable, "-c", head + code + tail],
        env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("found:")]
    assert lines, done.stdout + done.stderr
    return json.loads(lines[0].removeprefix("found:"))
