"""The documentation site: its pages, the links that are made to fit, its reference from code, and the built site as a whole."""

import html.parser
import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import yaml

import quire
from deploy.site.__main__ import SITE, build, stage
from deploy.site.pages import ELSEWHERE, Pages, page_of
from quire.cli import RootGroup
from tests.support.tree import ROOT, files, name_of


class _Links(html.parser.HTMLParser):
    """Of a page: `ids`, what it links to (`targets`), and what it loads (`loads`)."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids, self.targets, self.loads = set[str](), list[str](), list[str]()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.ids |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.targets.append(given["href"])
        elif "src" in given:
            self.loads.append(given["src"])
        elif tag == "link" and given.get("rel") in {"stylesheet", "icon"}:
            self.loads.append(given["href"])


def in_navigation() -> set[str]:
    """Pages that mkdocs.yml lists; a folder stands for its pages."""

    def pages(entry: object) -> list[str]:
        if isinstance(entry, dict):
            return [page for value in entry.values() for page in pages(value)]
        return [page for item in entry for page in pages(item)] if isinstance(entry, list) else [str(entry)]

    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    return set(pages(yaml.safe_load(navigation)))


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all pages, before they are built."""
    folder = tmp_path_factory.mktemp("site") / "pages"
    stage(folder)
    return folder


def test_every_document_is_in_the_navigation(staged: Path) -> None:
    """A new page of docs/ gets a place in mkdocs.yml, and no entry lacks its page."""
    listed = in_navigation()
    folders = tuple(name for name in listed if name.endswith("/"))
    documents = {page_of(name) for path in files() if re.match(r"docs/.*\.md$", name := name_of(path))}
    assert {page for page in documents | set(ELSEWHERE.values()) if not page.startswith(folders)} <= listed
    assert all((staged / page).exists() for page in listed)


def test_links_fit_the_site(tmp_path: Path) -> None:
    """Documents, protos and files have their places in the site; folders have none; code is not touched."""
    adapted = Pages(tmp_path).adapted
    assert adapted("docs/a.md", "[x](errors.md#y)") == "[x](errors.md#y)\n"
    assert adapted("docs/a.md", "[x](../CHANGELOG.md)") == "[x](project/changelog.md)\n"
    assert adapted("README.md", "[`x`](docs/lab.md), ![p](docs/pictures/top.png)") == (
        "[`x`](../lab.md), ![p](../pictures/top.png)\n"
    )
    assert adapted("docs/a.md", "[x](../protos/inference/v1/admin.proto)") == "[x](reference/protos/admin.md)\n"
    assert adapted("docs/decisions/b.md", "[x](../../quire/why.py)") == "[x](../source/quire/why.py.txt)\n"
    assert adapted("docs/a.md", "[x](../quire/) [y](https://example.org)") == "x [y](https://example.org)\n"
    code = "```sh\n[x](../quire/)\n- y\n```\n"
    assert adapted("docs/a.md", code) == code
    assert adapted("docs/a.md", "text:\n- one\n- two\n") == "text:\n\n- one\n- two\n"
    assert adapted("docs/a.md", "| `a\\|b` | c\\|d |") == "| `a|b` | c\\|d |\n"


def test_names_and_tables_of_options_are_marked() -> None:
    """By deploy/site/markup.py, for quire.css: short names with hyphens; four columns with names in the first."""
    markdown = pytest.importorskip("markdown", reason="make site")
    page = markdown.Markdown(extensions=["deploy.site.markup", "tables"])
    assert page.convert("`--a-b` `a_b`") == '<p><code class="name">--a-b</code> <code>a_b</code></p>'
    options = "| option | kind | default | meaning |\n|---|---|---|---|\n| `--a` | text | `b` | c |\n"
    assert "<table data-options" in page.convert(options)
    assert "<table>" in page.convert(options + "| no code | | | |\n")


def test_reference_is_whole(staged: Path) -> None:
    """Each command, each public Python name, each message and service has its entry."""
    commands = (staged / "reference/commands.md").read_text(encoding="utf-8")
    assert all(f"\n## quire {name}\n" in commands for name in RootGroup.table)
    assert "[bold]" not in commands
    python = (staged / "reference/python.md").read_text(encoding="utf-8")
    assert len(re.findall(r"^::: ", python, re.M)) == len(quire.__all__) - 1
    for path in (ROOT / "protos").rglob("*.proto"):
        defined = re.findall(r"^(?:message|enum|service) (\w+) \{", path.read_text(encoding="utf-8"), re.M)
        page = (staged / f"reference/protos/{path.stem}.md").read_text(encoding="utf-8")
        assert re.findall(r"^## (\w+)$", page, re.M) == defined != []


@pytest.mark.long
def test_the_built_site(record_property: Callable[[str, object], None]) -> None:
    """Built without a warning; every link leads to a file and a place in it, and nothing is loaded from other hosts."""
    if importlib.util.find_spec("zensical") is None:
        pytest.skip("zensical is not installed: make site")
    build()
    pages = {path: _Links(path.read_text(encoding="utf-8")) for path in SITE.rglob("*.html") if path.name != "404.html"}
    broken = [
        (path.name, link) for path, page in pages.items() for link in page.targets if not _leads(path, link, pages)
    ]
    assert not broken, broken[:20]
    loads = {link for page in pages.values() for link in page.loads}
    assert loads and not [link for link in loads if urlsplit(link).netloc]
    assert (SITE / "search.json").stat().st_size > 100_000
    text = (SITE / "llms.txt").read_text(encoding="utf-8")
    named = re.findall(r"\(<http://[^/]+/(.*?)>\)", text)
    assert len(named) > 80 and all((SITE / name).is_file() for name in named)
    assert (SITE / "llms-full.txt").stat().st_size > 300_000
    record_property(
        "size", f"{len(pages)} pages of the site, {sum(len(page.targets) for page in pages.values())} links"
    )


def _leads(path: Path, link: str, pages: dict[Path, _Links]) -> bool:
    """Whether a link of a page leads to a file and to a place in it; links to other hosts are not followed."""
    parts = urlsplit(link)
    if parts.scheme:
        return True
    target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    target = target / "index.html" if target.is_dir() else target
    if target not in pages:
        return target.is_file()
    return not parts.fragment or unquote(parts.fragment) in pages[target].ids or parts.fragment == "__skip"
