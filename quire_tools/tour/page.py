"""The tour as one self-contained HTML page: contents, then each screen as it was printed."""

import html
import io
from collections.abc import Sequence

from quire_tools.tour.console import screen_console
from quire_tools.tour.guide import CompletedStop

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Quire: the tour</title>
<style>
:root {{ color-scheme: light; }}
body {{ margin: 2rem auto; max-width: 64rem; padding: 0 1rem; font: 16px/1.5 system-ui, sans-serif; color: #1c2230; }}
nav ol {{ columns: 2; }}
a {{ color: #0b5cad; }}
pre {{ font: 13px/1.25 "DejaVu Sans Mono", Menlo, Consolas, monospace; background: #fbfbfd; border: 1px solid #d9dde6;
       border-radius: 6px; padding: 0.8rem; overflow-x: auto; }}
.good {{ color: #14722e; }} .bad {{ color: #b3261e; }}
</style>
</head>
<body>
<h1>Quire: the tour</h1>
<p>Each screen was drawn from a running stack of gateway, scheduler and worker.
Behind its title is the document that explains it.</p>
<nav><ol>
{contents}
</ol></nav>
{screens}
</body>
</html>
"""
_ENTRY = '<li><a href="#{name}">{name}</a> <span class="{mark}">{sign}</span> {summary}</li>'
_SCREEN = '<section id="{name}">\n<h2>{name}</h2>\n<p>{summary}</p>\n{picture}\n</section>'
_PICTURE = "<pre>{code}</pre>"


def page(visits: Sequence[CompletedStop]) -> str:
    """The whole page."""
    return _PAGE.format(
        contents="\n".join(_filled(_ENTRY, visit) for visit in visits),
        screens="\n".join(_filled(_SCREEN, visit, picture=_picture(visit)) for visit in visits),
    )


def _filled(template: str, visit: CompletedStop, picture: str = "") -> str:
    return template.format(
        name=html.escape(visit.stop.name),
        summary=html.escape(visit.stop.summary),
        mark="good" if visit.passed else "bad",
        sign="✓" if visit.passed else "✗",
        picture=picture,
    )


def _picture(visit: CompletedStop) -> str:
    """The screen's text with its colours, then its drawings; rich escapes HTML."""
    console = screen_console(io.StringIO(), record=True, force_terminal=True)
    console.print(visit.picture())
    console.print(visit.verdict, soft_wrap=True)
    drawings = visit.screen.drawings if visit.screen is not None else ()
    return "\n".join((console.export_html(inline_styles=True, code_format=_PICTURE), *drawings))
