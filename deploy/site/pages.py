"""Documents of the repository as pages of the site: where each is, and its links.

On a forge links lead through the repository. In the site a link to a document leads to its page, a link to a proto to its
reference, and one to another file to that file's text; a folder is named without a link.
"""

import os
import re
import shutil
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[2]
# Documents that are not in docs/, and their pages.
ELSEWHERE = {
    "README.md": "project/readme.md",
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "SECURITY.md": "project/security.md",
    "benchmarks/README.md": "project/benchmarks.md",
    "models/tiny/README.md": "project/tiny.md",
    "tests/golden/README.md": "project/golden.md",
    "examples/cpp/README.md": "clients/cpp.md",
    "examples/java/README.md": "clients/java.md",
    "examples/node/README.md": "clients/node-example.md",
    "examples/rust/README.md": "clients/rust.md",
}
_IMAGES = {".png", ".svg", ".jpg"}
_FENCE = re.compile(r"^(?:```|~~~)")
_LINK = re.compile(r"(?P<mark>!?)\[(?P<text>(?:[^\[\]]|\[[^\[\]]*\])*)\]\((?P<target>[^)\s]+)\)")
_CODE = re.compile(r"`[^`]+`")
_LIST_ITEM = re.compile(r"(?:[-*+]|\d+\.) ")


class Pages:
    """Writes pages below `folder`. `sources`: files of the repository that pages link to or show, by their place in the site."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sources: dict[str, Path] = {}

    def write_documents(self) -> None:
        """Write every document, then the pictures and source files that they name."""
        own = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")}
        for name in sorted(own | ELSEWHERE.keys()):
            self.write_page(page_of(name), self.adapted(name, (ROOT / name).read_text(encoding="utf-8")))
        shutil.copytree(ROOT / "docs" / "site", self.folder / "site")
        for place, source in self.sources.items():
            (self.folder / place).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, self.folder / place)

    def write_page(self, place: str, markdown: str) -> None:
        """Write one page."""
        target = self.folder / place
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(markdown, encoding="utf-8")

    def adapted(self, name: str, markdown: str) -> str:
        """The document's text with links that fit the site, and lists and tables as Python-Markdown reads them."""
        lines, fenced, before = list[str](), False, ""
        for line in markdown.splitlines():
            if _FENCE.match(line.lstrip()):
                fenced = not fenced
            elif not fenced and _LIST_ITEM.match(line) and before.strip() and not _continues_list(before):
                lines.append("")  # a list begins after an empty line
            is_row = not fenced and line.startswith("|")
            lines.append(_CODE.sub(_unescaped, line) if is_row else line)
            before = line
        parts = re.split(r"(^(?:```|~~~).*?^(?:```|~~~)$)", "\n".join(lines), flags=re.M | re.S)
        parts[::2] = [self._linked(name, part) for part in parts[::2]]
        return "".join(parts) + "\n"

    def _linked(self, name: str, text: str) -> str:
        return _LINK.sub(lambda found: self._link(name, found), text)

    def _link(self, name: str, found: re.Match[str]) -> str:
        target, _, anchor = found["target"].partition("#")
        text = self._linked(name, found["text"])
        if not target or re.match(r"[a-z]+:", target):
            return f"{found['mark']}[{text}]({found['target']})"
        wanted = os.path.normpath(f"{PurePosixPath(name).parent}/{target}")
        place = self._place(wanted)
        if place is None:
            return text
        relative = os.path.relpath(place, PurePosixPath(page_of(name)).parent)
        return f"{found['mark']}[{text}]({relative}{'#' + anchor if anchor else ''})"

    def _place(self, wanted: str) -> str | None:
        """Where the site has a file of the repository; None for folders without a page."""
        path = ROOT / wanted
        if path.is_dir():
            readme = f"{wanted}/README.md"
            return page_of(readme) if readme in ELSEWHERE or wanted.startswith("docs/") else None
        if path.suffix == ".proto" and wanted.startswith("protos/"):
            return f"reference/protos/{path.stem}.md"
        if path.suffix == ".md" and (wanted in ELSEWHERE or wanted.startswith("docs/")):
            return page_of(wanted)
        if wanted.startswith("docs/"):
            place = wanted.removeprefix("docs/")
        else:
            place = f"source/{wanted}" if path.suffix in _IMAGES else f"source/{wanted}.txt"
        self.sources[place.replace("/.", "/")] = path
        return place.replace("/.", "/")


def page_of(name: str) -> str:
    """The page of a document of the repository."""
    if name in ELSEWHERE:
        return ELSEWHERE[name]
    place = name.removeprefix("docs/")
    return place.replace("README.md", "index.md") if place.endswith("/README.md") else place


def _unescaped(code: re.Match[str]) -> str:
    """Code of a table's row without escapes: forges need them before pipes, Python-Markdown shows them."""
    return code[0].replace(r"\|", "|")


def _continues_list(line: str) -> bool:
    return bool(_LIST_ITEM.match(line.lstrip())) or line.startswith(" ")
