"""Install Horovod, built against the torch that is here; the wheel is kept, so that a second call takes seconds.

    python scripts/install_horovod.py      # `make engines` calls it

The wheel lies in the cache (COS598D_CACHE, else ~/.cache/cos598d), in a folder for this Python, torch and processor.
Building takes about 6 minutes on 2 cores. It needs Debian's packages g++, make and, for a Python from Debian,
python3-dev; cmake and the setuptools that Horovod was written for come from pip, into a folder that goes afterwards.
"""

import os
import platform
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from cos598d.errors import UserError  # noqa: E402
from cos598d.terminal.files import cache_folder, write_whole  # noqa: E402

VERSION = "0.28.1"
# Horovod's CMake files are too old for cmake 4, and its setup.py imports pkg_resources, which setuptools 81 dropped.
BUILD_TOOLS = ("cmake==3.31.10", "setuptools==80.10.2", "wheel==0.48.0", "packaging==26.3")
# PyTorch and gloo alone: without MPI, TensorFlow and MXNet nothing of theirs is looked for.
FEATURES = {
    "HOROVOD_WITH_PYTORCH": "1",
    "HOROVOD_WITH_GLOO": "1",
    "HOROVOD_WITHOUT_MPI": "1",
    "HOROVOD_WITHOUT_TENSORFLOW": "1",
    "HOROVOD_WITHOUT_MXNET": "1",
    "HOROVOD_CPU_OPERATIONS": "GLOO",
}
PIP = (sys.executable, "-m", "pip")
QUIET = ("--quiet", "--disable-pip-version-check")


def main() -> None:
    folder = cache_folder() / "horovod" / f"torch{version('torch')}-{sys.implementation.cache_tag}-{platform.machine()}"
    wheel = next(folder.glob(f"horovod-{VERSION}-*.whl"), None)
    if wheel is None:
        print(f"== building Horovod {VERSION} (once, about 6 minutes on 2 cores)", flush=True)
        wheel = build(folder)
    subprocess.run([*PIP, "install", *QUIET, "--no-deps", "--force-reinstall", str(wheel)], check=True)


def build(folder: Path) -> Path:
    """Build the wheel and put it into `folder`; return where it is. Raises UserError if it fails."""
    with tempfile.TemporaryDirectory(prefix="horovod-") as name:
        place = Path(name)
        subprocess.run([*PIP, "install", *QUIET, "--target", str(place / "tools"), *BUILD_TOOLS], check=True)
        environ = os.environ | FEATURES
        environ |= {
            "CXX": str(ROOT / "scripts" / "cxx17"),
            "MAKEFLAGS": f"-j{len(os.sched_getaffinity(0))}",
            "PATH": f"{place / 'tools' / 'bin'}:{os.environ['PATH']}",
            "PYTHONPATH": str(place / "tools"),  # before what is installed here
        }
        words = [*PIP, "wheel", "--disable-pip-version-check", "--no-build-isolation", "--no-deps"]
        words += ["--no-binary", "horovod", "--wheel-dir", str(place), f"horovod=={VERSION}"]
        done = subprocess.run(words, check=False, env=environ, capture_output=True, text=True)
        if done.returncode:
            print((done.stdout + done.stderr)[-4000:], file=sys.stderr)
            needed = "Install Debian's packages g++, make and python3-dev, then run make engines again."
            raise UserError(f"Horovod {VERSION} could not be built: the end of the compiler's words is above. {needed}")
        (built,) = place.glob("horovod-*.whl")
        write_whole(folder / built.name, built.read_bytes())
        return folder / built.name


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
    except (subprocess.CalledProcessError, PackageNotFoundError) as error:
        sys.exit(f"Horovod is not installed: {error}.")
