"""Build the book, a static site that needs no server and fetches nothing: `python scripts/make_book.py [FOLDER]`.

FOLDER is `site` unless it is given. Its front page is the README, and each other document has a page at its own
path, under the titles of book_site/mkdocs.yml. A link or an anchor that leads nowhere, and a document without a title,
fail the build, and leave an older book as it is. It needs the extra `book`.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from book_site.pages import assemble  # noqa: E402

from cos598d.errors import UserError  # noqa: E402
from cos598d.terminal.files import whole_folder  # noqa: E402

OURS = ("book.css", "iframe-worker.js")


def build(site: Path, root: Path = ROOT) -> int:
    """Build the book of the repository at `root` into the folder `site`, in place of an older book.

    Returns the number of documents. Raises UserError for a folder with something else in it, and a link that leads
    nowhere; `site` is then as it was.
    """
    here = root / "scripts" / "book_site"
    if importlib.util.find_spec("material") is None:
        raise UserError("mkdocs-material is not installed: `make book` installs it.")
    site = site.absolute()
    if site.exists() and not (site / "assets" / OURS[0]).is_file() and (not site.is_dir() or any(site.iterdir())):
        raise UserError(f"{site} exists and is no documentation site. Name another folder.")
    with tempfile.TemporaryDirectory() as place, whole_folder(site) as fresh:
        source = Path(place, "pages")
        pages = assemble(root.resolve(), source)
        (source / "assets").mkdir(exist_ok=True)
        for name in OURS:
            shutil.copy(here / name, source / "assets")
        settings = Path(place, "mkdocs.yml")
        settings.write_text(json.dumps({"INHERIT": str(here / "mkdocs.yml"), "docs_dir": str(source)}))
        render(settings, fresh)
    return pages


def render(settings: Path, site: Path) -> None:
    """Have the site generator make `site`. Raises UserError with its warnings, none of which it may have."""
    words = ["build", "--strict", "--config-file", settings, "--site-dir", site]
    # Else both print advertisements for what is to follow them.
    quiet = {"NO_MKDOCS_2_WARNING": "1", "DISABLE_MKDOCS_2_WARNING": "true"}
    ended = subprocess.run(
        [sys.executable, "-m", "mkdocs", *words], env=os.environ | quiet, capture_output=True, text=True, check=False
    )
    if ended.returncode:
        lines = [line for line in ended.stderr.splitlines() if line.strip() and not line.startswith("INFO")]
        raise UserError("mkdocs: " + " ".join(lines or ["it ended without a word"]))


def main() -> None:
    site = Path(sys.argv[1]) if sys.argv[1:] else ROOT / "site"
    try:
        print(f"{site / 'index.html'}: {build(site)} pages")
    except UserError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
