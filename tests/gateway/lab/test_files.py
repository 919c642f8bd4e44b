"""The lab's page as files: whole, by itself, packed, and with words for every reason there is."""

import re
import tomllib
from pathlib import Path

from gateway_svc.lab.app import PAGE
from quire_tools.reasons_now import BEFORE
from scheduler_svc.core.reasons import Reason
from tests.support.tree import ROOT

FILES = sorted(path for path in PAGE.rglob("*") if path.is_file())
_MOST_LINES = 300


def test_the_page_is_whole_and_alone() -> None:
    """Every file that it names is there; it names no other host, and has no script or style in itself."""
    page = (PAGE / "index.html").read_text(encoding="utf-8")
    assert re.findall(r"<script(?![^>]*\bsrc=)", page) == [] == re.findall(r"<style|\bstyle=|\bon\w+=", page)
    named = re.findall(r'(?:src|href)="(/page/[^"]+)"', page)
    assert len(named) >= 5 and all((PAGE / name.removeprefix("/page/")).is_file() for name in named)
    scripts = sorted((PAGE / "js").glob("*.js"))
    for script in scripts:
        text = script.read_text(encoding="utf-8")
        for module in re.findall(r'from "([^"]+)"', text):
            assert (script.parent / module).resolve() in scripts, (script.name, module)
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text)
    for file in (file for file in PAGE.rglob("*") if file.is_file()):
        urls = re.findall(r"https?://[^\s\"')]+", file.read_text(encoding="utf-8"))
        assert all(url.startswith("http://www.w3.org/") for url in urls), (file.name, urls)


def test_its_files_are_small_and_packed() -> None:
    """An installed gateway has them: the package's data names every one; each can be read at a sitting."""
    data = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["package-data"]
    folder = ROOT / "gateway_svc"
    packed = {path for pattern in data["gateway_svc"] for path in folder.glob(pattern) if path.is_file()}
    assert packed == set(FILES) and len(FILES) > 15
    long = {path.name: count for path in FILES if (count := len(_lines(path))) > _MOST_LINES}
    assert not long


def test_every_reason_has_words() -> None:
    """Those of the core, and the one that a recording adds; and no others."""
    text = (PAGE / "js" / "reasons.js").read_text(encoding="utf-8")
    named = set(re.findall(r"^  ([A-Z_]+): \[", text, re.M))
    assert named == {reason.value for reason in Reason} | {BEFORE}


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()
