"""The site: its pages are the documents, with their pictures and source files. Imports: the script that builds it,
which needs the site generator."""

import importlib.util
import re
import shutil
from pathlib import Path

import make_book
import pytest
from book_site.pages import assemble

from cos598d.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [path for pattern in ("*.md", "docs/*.md", "docs/lessons/*.md") for path in ROOT.glob(pattern)]
SETTINGS = ROOT / "scripts" / "book_site" / "mkdocs.yml"
rendered = pytest.mark.skipif(
    importlib.util.find_spec("material") is None, reason="mkdocs-material is not installed: make book installs it"
)


@pytest.fixture
def repository(tmp_path):
    """A small repository with a document, a picture and a source file."""
    root = tmp_path / "repository"
    (root / "docs").mkdir(parents=True)
    (root / "code").mkdir()
    (root / "README.md").write_text('# Front\n\n[all](docs/all.md#one) <img src="docs/a.svg">\n')
    (root / "docs" / "all.md").write_text("# All\n\n## One\n\n[code](../code/ring.py) [front](../README.md)\n")
    (root / "docs" / "a.svg").write_text('<svg xmlns="http://www.w3.org/2000/svg"/>')
    (root / "code" / "ring.py").write_text("print('ring')\n")
    shutil.copytree(SETTINGS.parent, root / "scripts" / "book_site")
    ours = re.sub(r"^nav:\n(?: .*\n)+", "", SETTINGS.read_text(), flags=re.MULTILINE)
    (root / "scripts" / "book_site" / "mkdocs.yml").write_text(ours)
    return root


def page(site, name):
    return (site / name).read_text(encoding="utf-8")


@rendered
def test_another_folder_is_not_replaced_and_a_failed_build_keeps_the_site(tmp_path, repository):
    place, mine = tmp_path / "site", tmp_path / "mine"
    assert make_book.build(place, repository) == 2
    assert (place / "code" / "ring.py.txt").is_file()
    mine.mkdir()
    (mine / "thesis.txt").write_text("years")
    with pytest.raises(UserError, match=r"mine exists and is no documentation site"):
        make_book.build(mine, repository)
    before = page(place, "index.html")
    (repository / "README.md").write_text("# Front\n\n[all](docs/all.md#three)\n")
    with pytest.raises(UserError, match=r"README.md.*#three"):
        make_book.build(place, repository)
    assert page(place, "index.html") == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "repository", "site"]


def test_links_lead_to_copies_of_files_and_a_lost_file_is_named(tmp_path, repository):
    assert assemble(repository, tmp_path / "pages") == 2
    assert "[code](../code/ring.py.txt) [front](../README.md)" in page(tmp_path / "pages", "docs/all.md")
    assert page(tmp_path / "pages", "code/ring.py.txt") == page(repository, "code/ring.py")
    assert (tmp_path / "pages" / "docs" / "a.svg").is_file()
    (tmp_path / "outside.txt").write_text("not of the repository")
    for link in ("../code/tree.py", "../code", "../../outside.txt"):
        (repository / "docs" / "all.md").write_text(f"# All\n\n[there]({link})\n")
        with pytest.raises(UserError, match=f"docs/all.md links to {link}, which is no file of this repository"):
            assemble(repository, tmp_path / "pages")


def test_the_site_has_every_document_once():
    listed = re.findall(r"^ +- (?:\w+: )?(\S+\.md)$", SETTINGS.read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(path.relative_to(ROOT).as_posix() for path in DOCUMENTS)
