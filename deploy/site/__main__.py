"""`python -m deploy.site`: build/site, from docs/ and the code; a warning is an error. `--serve` then shows it on this machine."""

import argparse
import functools
import http.server
import shutil
import subprocess
import sys
from pathlib import Path

from deploy.site.commands import commands_page
from deploy.site.pages import ROOT, Pages
from deploy.site.protos import proto_page
from deploy.site.python_api import python_page

SITE = ROOT / "build" / "site"
STAGED = ROOT / "build" / "site-pages"
"""What mkdocs.yml calls `docs_dir`."""


def stage(folder: Path) -> Pages:
    """Write the pages into `folder`, emptied first: documents with their links made to fit, and the reference made from code."""
    shutil.rmtree(folder, ignore_errors=True)
    pages = Pages(folder)
    pages.write_documents()
    for path in sorted((ROOT / "protos").rglob("*.proto")):
        pages.write_page(f"reference/protos/{path.stem}.md", proto_page(path))
    pages.write_page("reference/commands.md", commands_page())
    pages.write_page("reference/python.md", python_page())
    return pages


def build() -> None:
    """Build the site. `subprocess.CalledProcessError` after a warning."""
    shutil.rmtree(SITE, ignore_errors=True)
    stage(STAGED)
    subprocess.run([sys.executable, "-m", "zensical", "build", "--strict", "--clean"], cwd=ROOT, check=True)


def serve(port: int) -> None:
    """Serve build/site at 127.0.0.1 until Ctrl-C."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(SITE))
    with http.server.ThreadingHTTPServer(("127.0.0.1", port), handler) as server:
        print(f"http://127.0.0.1:{server.server_port}/  (Ctrl-C ends it)", flush=True)  # noqa: T201
        server.serve_forever()


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m deploy.site", description=__doc__)
    parser.add_argument("--serve", action="store_true", help="show the site after building it")
    parser.add_argument("--port", type=int, default=8080, help="port for --serve; 0 = any free one")
    options = parser.parse_args()
    try:
        build()
        if options.serve:
            serve(options.port)
    except subprocess.CalledProcessError as error:
        return int(error.returncode)
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
