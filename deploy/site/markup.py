"""Python-Markdown extension: marks what quire.css treats differently.

- Short names in code, such as `--max-num-seqs`, get the class `name`.
- Tables of four columns of which the first has names in code, such as those of options, get the attribute `data-options`.
"""

from xml.etree.ElementTree import Element

from markdown import Markdown
from markdown.extensions import Extension
from markdown.treeprocessors import Treeprocessor

_MAX_LENGTH = 36
"""What fits beside a list's mark on a phone."""
_MAX_LENGTH_IN_CELL = 24


class _Marks(Treeprocessor):
    def run(self, root: Element) -> None:
        in_cells = {code for cell in root.iter("td") for code in cell.iter("code")}
        for code in root.iter("code"):
            text = code.text or ""
            if "-" in text and len(text) <= (_MAX_LENGTH_IN_CELL if code in in_cells else _MAX_LENGTH):
                code.set("class", "name")
        for table in root.iter("table"):
            if _is_of_options(table):
                table.set("data-options", "")


def _is_of_options(table: Element) -> bool:
    head, *body = (list(row) for row in table.iter("tr"))
    is_plain = len(head) == 4 and not list(head[0]) and "style" not in head[3].attrib
    return is_plain and all(row[0].find("code") is not None for row in body)


class _MarksExtension(Extension):
    def extendMarkdown(self, md: Markdown) -> None:
        md.treeprocessors.register(_Marks(md), "marks", 15)  # after "inline", which makes the elements


def makeExtension() -> _MarksExtension:
    """What Python-Markdown calls for `deploy.site.markup` in mkdocs.yml."""
    return _MarksExtension()
