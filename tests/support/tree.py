"""The files of this repository, as version control sees them: tracked, or new and not ignored."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NOT_OURS = {".venv", ".git", "build", "dist", "__pycache__"}


def files() -> list[Path]:
    """All of them; without git (an unpacked archive) every file outside .venv and build folders."""
    command = ["git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard", "-z"]
    try:
        listed = subprocess.run(command, capture_output=True, check=True, timeout=60).stdout.decode().split("\0")
    except (OSError, subprocess.CalledProcessError):
        listed = [str(path.relative_to(ROOT)) for path in ROOT.rglob("*") if not NOT_OURS & set(path.parts)]
    paths = [ROOT / name for name in listed if name]
    return [path for path in paths if path.is_file()]


def python_files() -> list[Path]:
    """Python sources, generated code left out."""
    return [path for path in files() if path.suffix == ".py" and not path.stem.endswith(("_pb2", "_pb2_grpc"))]


def text_files() -> Iterator[tuple[Path, str]]:
    """Every file that is UTF-8 text, with its text; weights and other binary files are left out."""
    for path in files():
        if path.suffix in {".safetensors", ".png"}:
            continue
        try:
            yield path, path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue


def name_of(path: Path) -> str:
    """Path below the root, with forward slashes."""
    return path.relative_to(ROOT).as_posix()


def run_python(code: str, *, cwd: Path = ROOT, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Runs `code` in a new interpreter of this environment; 60 s at most."""
    return subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env=env, capture_output=True, text=True, timeout=60, check=False
    )
