"""The site: its pages are the documents, it loads nothing from other hosts, and every link has a target."""

import importlib.util
import json
import re
import shutil
from pathlib import Path

import make_book
import pytest
from book_site.links import Page, leading_nowhere, read_pages, taken_from_elsewhere
from book_site.pages import TRY, assemble, documents, listing, navigation, prepared

from cos598d.errors import UserError
from cos598d.tools.course import NUMBERS

ROOT = Path(__file__).resolve().parents[1]
rendered = pytest.mark.skipif(
    importlib.util.find_spec("material") is None, reason="mkdocs-material is not installed: make book installs it"
)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The book of this repository."""
    place = tmp_path_factory.mktemp("book") / "site"
    make_book.build(place)
    return place


@pytest.fixture
def repository(tmp_path):
    """A small repository with a document, a picture and a source file."""
    root = tmp_path / "repository"
    (root / "docs" / "lessons").mkdir(parents=True)
    (root / "code").mkdir()
    (root / "README.md").write_text('# Front\n\n[all](docs/all.md#one) <img src="docs/a.svg">\n')
    (root / "docs" / "all.md").write_text("# All\n\n## One\n\n[code](../code/ring.py) [front](../README.md)\n")
    (root / "docs" / "a.svg").write_text('<svg xmlns="http://www.w3.org/2000/svg"/>')
    (root / "code" / "ring.py").write_text("print('```')\n")
    for number in (10, 9):
        (root / "docs" / "lessons" / f"lesson{number}.md").write_text(f"# Lesson {number}\n")
    return root


def page(site, name):
    return (site / name).read_text(encoding="utf-8")


@rendered
def test_nothing_is_fetched_from_other_hosts_and_every_link_has_a_target(site):
    pages = read_pages(site)
    assert taken_from_elsewhere(site, pages) == []
    assert leading_nowhere(site, pages) == []


@rendered
def test_every_document_is_in_the_navigation_of_the_front_page_and_in_the_search(site):
    links = {target for _, target in Page(page(site, "index.html")).references}
    index = json.loads(page(site, "search/search_index.json"))["docs"]
    found = {entry["location"].partition("#")[0] for entry in index}
    for document in documents(ROOT):
        built = "index.html" if document == "README.md" else document.removesuffix(".md") + ".html"
        assert built in links
        assert built in found
    assert page(site, "search/search_index.js").startswith("var __index = {")  # what a page that is a file reads


@rendered
def test_a_listing_has_all_lines_of_its_file_with_their_numbers(site):
    listed = [path for path in site.rglob("*.py.html") if (ROOT / path.relative_to(site).with_suffix("")).is_file()]
    assert listed
    for path in listed:
        lines = (ROOT / path.relative_to(site).with_suffix("")).read_text().rstrip().split("\n")
        numbers = re.findall(r'data-linenos="\s*(\d+)\s*"', path.read_text())
        assert [int(number) for number in numbers] == list(range(1, len(lines) + 1))


@rendered
def test_questions_fold_without_a_script(site):
    asked = [name for name in documents(ROOT) if "<summary>" in (ROOT / name).read_text()]
    assert asked
    for name in asked:
        text = page(site, name.removesuffix(".md") + ".html")
        assert text.count("<summary>") == (ROOT / name).read_text().count("<summary>")
        assert "markdown=" not in text


@rendered
def test_every_lessons_page_links_to_its_notebook_and_to_the_wheel(site):
    (wheel,) = (site / TRY).glob("*.whl")
    for number in NUMBERS:
        links = [target for _, target in Page(page(site, f"docs/lessons/lesson{number}.html")).references]
        assert {f"try/lesson{number}.ipynb", f"try/{wheel.name}"} <= set(links)
        assert (site / TRY / f"lesson{number}.ipynb").is_file()


@rendered
def test_a_students_work_next_to_the_notebooks_is_not_removed(tmp_path, repository):
    place = tmp_path / "site"
    make_book.build(place, repository)
    for name in ("lesson9.py", ".ipynb_checkpoints"):
        mine = place / TRY / name
        mine.mkdir(parents=True)
        with pytest.raises(UserError, match=f"{name} is not part of the site. Move"):
            make_book.build(place, repository)
        mine.rmdir()


@rendered
def test_another_folder_is_not_replaced_and_a_failed_build_keeps_the_older_site(tmp_path, repository):
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("years")
    with pytest.raises(UserError, match=r"mine exists and is no documentation site"):
        make_book.build(mine, repository)
    place = tmp_path / "site"
    assert make_book.build(place, repository) == (4, 1)
    before = page(place, "index.html")
    (repository / "README.md").write_text("# Front\n\n[all](docs/all.md#three)\n")
    with pytest.raises(UserError, match=r"README.md.*#three"):
        make_book.build(place, repository)
    assert page(place, "index.html") == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "repository", "site"]


def test_without_the_site_generator_a_sentence_says_what_installs_it(tmp_path, monkeypatch):
    monkeypatch.setattr(make_book.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"not installed: `make book` installs it"):
        make_book.build(tmp_path / "site")


def test_links_to_source_files_lead_to_listings_and_lessons_are_sorted(tmp_path, repository):
    pages, listings = assemble(repository, tmp_path / "pages")
    assert pages == ["README.md", "docs/all.md", "docs/lessons/lesson9.md", "docs/lessons/lesson10.md"]
    assert listings == ["code/ring.py.md"]
    assert "[code](../code/ring.py.md) [front](../README.md)" in page(tmp_path / "pages", "docs/all.md")
    assert "````" in page(tmp_path / "pages", "code/ring.py.md")  # the file has three of them itself
    assert (tmp_path / "pages" / "docs" / "a.svg").is_file()


@pytest.mark.parametrize(
    ("link", "words"),
    [
        ("../code/tree.py", r"docs/all.md links to ../code/tree.py, which is no file of this repository"),
        ("../code", r"docs/all.md links to ../code, which is no file"),
        ("../../outside.txt", r"docs/all.md links to ../../outside.txt, which is no file"),
        ("../code/blob.bin", r"code/blob.bin, to which a page links, is neither text nor a picture"),
    ],
)
def test_a_link_without_a_possible_page_is_named(tmp_path, repository, link, words):
    (tmp_path / "outside.txt").write_text("not of the repository")
    (repository / "code" / "blob.bin").write_bytes(b"\xff\xfe\x00")
    (repository / "docs" / "all.md").write_text(f"# All\n\n[there]({link})\n")
    with pytest.raises(UserError, match=words):
        assemble(repository, tmp_path / "pages")


def test_all_sections_together_have_every_document_once():
    pages = documents(ROOT)
    front, *sections = navigation(pages)
    named = [page for section in sections for found in section.values() for page in found]
    assert sorted([*front.values(), *named]) == sorted(pages)
    assert "docs/new.md" in navigation([*pages, "docs/new.md"])[2]["Do"]


def test_code_is_unchanged():
    text = "a `[x](y)` [z](w)\n- one\n\n```\n[x](y)\n- two\n<!-- book: output learn -->\n```\n"
    assert prepared(text, lambda _: "there") == text.replace("(w)\n", "(there)\n\n")
    assert prepared("<!-- book: output learn 5\n --check -->\n", str) == "\n"


def test_a_listing_is_highlighted_by_its_real_language():
    assert "``` python linenums" in listing("docs/lessons/wrong/lesson5.py.txt", "pass\n")
    assert "``` text linenums" in listing("LICENSE", "MIT\n")


def test_external_loads_and_dead_links_are_found(tmp_path):
    site = tmp_path / "site"
    (site / "docs").mkdir(parents=True)
    (site / "index.html").write_text(
        '<h1 id="top">x</h1><a href="https://example.org">to click</a><a href="docs/a.html#here">x</a>'
        '<a href="docs/a.html#gone">x</a><a href="/docs/a.html">x</a><a href="#nowhere">x</a><a href="#top">x</a>'
        '<img src="//example.org/x.png"><img src="data:image/png;base64,AA"><style>b{background:url(https://c.d/e)}</style>'
    )
    (site / "docs" / "a.html").write_text('<p id="here"></p><img src="lost.svg"><img srcset="../index.html 2x">')
    (site / "style.css").write_text('@import "https://example.org/font.css"; a { background: url("data:,x") }')
    pages = read_pages(site)
    assert taken_from_elsewhere(site, pages) == [
        "index.html: //example.org/x.png",
        "index.html: https://c.d/e",
        "style.css: https://example.org/font.css",
    ]
    assert leading_nowhere(site, pages) == [
        "docs/a.html: lost.svg",
        "index.html: docs/a.html#gone",
        "index.html: /docs/a.html",
        "index.html: #nowhere",
    ]
    shutil.rmtree(site / "docs")
    assert "index.html: docs/a.html#here" in leading_nowhere(site, read_pages(site))


def test_a_wheel_that_cannot_be_built_is_one_sentence(tmp_path, repository):
    (repository / "cos598d").mkdir()
    (repository / "LICENSE").write_text("MIT")
    (repository / "setup.py").write_text("raise SystemExit('no compiler')")
    with pytest.raises(UserError, match=r"pip cannot build the package's wheel: .*make setup"):
        make_book.build_wheel(repository, tmp_path / "wheels")
