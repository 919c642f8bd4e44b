"""Packages and peers for a machine without a network, as wheels in a folder of the checkout.

    python -m benchmarks.gpu.wheels --python 3.12      # where there is a network: fills .gpu-wheels, some 20 MB
    python -m benchmarks.gpu.wheels --peers            # FlashInfer, and FlashAttention-3 out of vLLM's wheel, some 55 MB more

`with_wheels` unpacks those that the machine lacks, without pip, and adds them behind what it has.
"""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".gpu-wheels"
BASE = (
    *("protobuf", "googleapis-common-protos", "grpcio-health-checking", "grpcio-reflection", "grpcio-status"),
    *("opentelemetry-api", "opentelemetry-sdk", "opentelemetry-proto", "opentelemetry-semantic-conventions"),
    *("opentelemetry-exporter-otlp-proto-grpc", "opentelemetry-exporter-otlp-proto-http"),
    *("opentelemetry-exporter-otlp-proto-common", "opentelemetry-exporter-otlp-common"),
    *("opentelemetry-exporter-http-transport", "requests", "urllib3", "idna", "certifi", "charset-normalizer"),
    *("prometheus-client", "pydantic", "pydantic-core", "annotated-types", "typing-inspection", "typing-extensions"),
    *("llguidance", "Jinja2", "MarkupSafe", "starlette", "anyio", "uvicorn", "h11", "uvloop", "gguf", "accelerate"),
    *(
        "psutil",
        "typer",
        "click",
        "rich",
        "shellingham",
        "annotated-doc",
        "Pygments",
        "markdown-it-py",
        "mdurl",
        "PyYAML",
    ),
    *("pytest", "pluggy", "iniconfig", "pytest-timeout", "hypothesis", "sortedcontainers"),
)
"""What services and tests need beside torch, triton, transformers and grpcio. Versions are those of constraints.txt."""
FLASHINFER = ("flashinfer-python==0.6.14", "apache-tvm-ffi")
VLLM = "vllm==0.26.0"
"""For torch 2.11: the library in the wheel belongs to one version of torch."""
_OF_VLLM = "vllm/vllm_flash_attn/"


def pins(names: Sequence[str], constraints: str) -> list[str]:
    """NAME==VERSION of each that is pinned, and NAME of the others."""
    known = {_plain(line.partition("==")[0]): line.strip() for line in constraints.splitlines() if "==" in line}
    return [known.get(_plain(name), name) for name in names]


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def trimmed(wheel: Path, folder: Path) -> Path:
    """A wheel with vLLM's FlashAttention alone, and nothing that imports the rest of vLLM."""
    made = folder / f"vllm_flash_attn_only-{wheel.name.split('-')[1]}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as target:
        target.writestr("vllm/__init__.py", "")
        for entry in source.infolist():
            is_old = "_vllm_fa2_C" in entry.filename
            if entry.filename.startswith(_OF_VLLM) and not is_old and not entry.is_dir():
                target.writestr(entry.filename, source.read(entry))
    return made


def with_wheels(environ: Mapping[str, str], parent: Path, say: Callable[[str], None]) -> dict[str, str]:
    """`environ` in which this checkout, and what the wheels add to the machine's packages, can be imported."""
    missing = [wheel for wheel in sorted(FOLDER.glob("*.whl")) if not _is_installed(wheel)]
    unpacked = parent / "packages"
    unpacked.mkdir()
    for wheel in missing:
        with zipfile.ZipFile(wheel) as file:
            file.extractall(unpacked)
    if missing:
        say(f"unpacked {len(missing)} wheels: {', '.join(wheel.name.split('-')[0] for wheel in missing)}")
    before = environ.get("PYTHONPATH")
    paths = [str(ROOT), str(ROOT / "kernels"), *([before] if before else []), str(unpacked)]
    return {**environ, "PYTHONPATH": os.pathsep.join(paths)}


def _is_installed(wheel: Path) -> bool:
    try:
        importlib.metadata.version(wheel.name.split("-")[0].replace("_", "-"))
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


# --- where there is a network ----------------------------------------------------------------------------------------


def _download(names: Sequence[str], folder: Path, python: str) -> None:
    platforms = [f"--platform=manylinux{tag}_x86_64" for tag in ("_2_28", "_2_17", "2014")]
    command = [
        *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"),
        *(f"--python-version={python}", *platforms, "--dest", str(folder), *names),
    ]
    subprocess.run(command, check=True)


def _peers(python: str) -> Iterator[str]:
    """Download the peers; yields what could not be."""
    for names in (FLASHINFER, (VLLM,)):
        with tempfile.TemporaryDirectory() as folder:
            try:
                _download(names, Path(folder), python)
            except subprocess.CalledProcessError:
                yield ", ".join(names)
                continue
            for wheel in Path(folder).glob("*.whl"):
                if wheel.name.startswith("vllm-"):
                    trimmed(wheel, FOLDER)
                else:
                    shutil.copy(wheel, FOLDER)


def main(
    python: Annotated[str, typer.Option(help="Python of the machine with the GPU.")] = "3.12",
    peers: Annotated[
        bool, typer.Option("--peers", help="FlashInfer, and FlashAttention-3 out of vLLM's wheel, too.")
    ] = False,
) -> None:
    """Fill .gpu-wheels, which `python -m benchmarks.gpu` uses on a machine without a network."""
    FOLDER.mkdir(exist_ok=True)
    _download(pins(BASE, (ROOT / "constraints.txt").read_text(encoding="utf-8")), FOLDER, python)
    for name in _peers(python) if peers else ():
        typer.echo(f"left out: {name} could not be downloaded", err=True)
    size = sum(wheel.stat().st_size for wheel in FOLDER.glob("*.whl"))
    typer.echo(f"{FOLDER}: {len([*FOLDER.glob('*.whl')])} wheels, {size / 1e6:.0f} MB")


if __name__ == "__main__":
    typer.run(main)
