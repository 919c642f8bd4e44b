"""Installs peers, each into an environment of its own; run by `make peers`.

    python -m benchmarks.compare.install vllm openvino llamacpp

An environment is remade when its pins change. A peer that cannot be installed is reported and left out; the
others continue.
"""

import hashlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.compare.engines.environments import ROOT

HERE = Path(__file__).resolve().parent
PEERS = ("vllm", "openvino", "llamacpp", "compressed-tensors", "ggml")
LLAMA_CPP_SOURCE = "llama-cpp-python==0.3.36"
LLAMA_CPP_PROGRAMS = ("llama-server", "llama-quantize")
# Image and audio dependencies that break the import of a text model unless their builds match torch's.
_USELESS = {"vllm": ("torchvision", "torchaudio", "torchcodec"), "openvino": ("torchvision",)}
# Native instructions, the server and what rounds weights.
_CMAKE_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DLLAMA_BUILD_COMMON=ON",
    "-DLLAMA_BUILD_TOOLS=ON",
    "-DLLAMA_BUILD_SERVER=ON",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_OPENSSL=OFF",
)


def requirements(name: str) -> Path:
    """The pins of a peer."""
    return HERE / f"requirements-{name}.txt"


def digest(name: str) -> str:
    """Digest of everything that determines what is installed."""
    built = " ".join((LLAMA_CPP_SOURCE, *LLAMA_CPP_PROGRAMS))
    return hashlib.sha256(requirements(name).read_bytes() + built.encode()).hexdigest()


def is_current(folder: Path, name: str) -> bool:
    """True if it is installed with these pins."""
    mark = folder / ".installed"
    return mark.is_file() and mark.read_text(encoding="utf-8") == digest(name)


def install(name: str, peers: Path, pip_flags: Sequence[str]) -> None:
    """Install a peer from scratch. Raises CalledProcessError or OSError on failure; nothing then counts as installed."""
    folder = peers / name
    venv.create(folder, clear=True, with_pip=True)
    python = str(folder / "bin" / "python")
    _run(python, "-m", "pip", "install", "--no-compile", *pip_flags, "-r", str(requirements(name)))
    if name in _USELESS:
        _run(python, "-m", "pip", "uninstall", "--yes", *_USELESS[name])
    if name == "llamacpp":
        _build_llama_cpp(folder, pip_flags)
    (folder / ".installed").write_text(digest(name), encoding="utf-8")


def _build_llama_cpp(folder: Path, pip_flags: Sequence[str]) -> None:
    with tempfile.TemporaryDirectory() as place:
        source = _llama_cpp_source(folder, Path(place), pip_flags)
        build, tool = Path(place) / "build", folder / "bin" / "cmake"
        ninja = f"-DCMAKE_MAKE_PROGRAM={folder / 'bin' / 'ninja'}"
        _run(str(tool), "-G", "Ninja", ninja, "-S", str(source), "-B", str(build), *_CMAKE_OPTIONS)
        _run(str(tool), "--build", str(build), "--target", *LLAMA_CPP_PROGRAMS)
        for program in LLAMA_CPP_PROGRAMS:
            shutil.copy2(build / "bin" / program, folder / "bin" / program)
    (folder / "llama.cpp.version").write_text(LLAMA_CPP_SOURCE.partition("==")[2], encoding="utf-8")


def _llama_cpp_source(folder: Path, place: Path, pip_flags: Sequence[str]) -> Path:
    """Download and unpack the source below `place`."""
    pip = (str(folder / "bin" / "python"), "-m", "pip", "download", "--no-deps", "--no-binary", "llama-cpp-python")
    _run(*pip, *pip_flags, "--dest", str(place), LLAMA_CPP_SOURCE)
    with tarfile.open(next(place.glob("*.tar.gz"))) as archive:
        archive.extractall(place, filter="data")
    return next(place.glob("*/vendor/llama.cpp"))


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


def main(
    names: Annotated[list[str], typer.Argument(help=f"Peers: {', '.join(PEERS)}.")],
    pip_flags: Annotated[str, typer.Option(help="Additional options of pip, such as --extra-index-url.")] = "",
    peers: Annotated[Path, typer.Option(help="Folder of the environments.")] = ROOT / ".venv" / "peers",
) -> None:
    """Installs missing peers. Exit status 0 even if one cannot be installed: peers are optional."""
    unknown = set(names) - set(PEERS)
    if unknown:
        raise typer.BadParameter(f"unknown: {', '.join(sorted(unknown))}; peers: {', '.join(PEERS)}")
    for name in names:
        if is_current(peers / name, name):
            print(f"{name} is already installed")
            continue
        try:
            install(name, peers, pip_flags.split())
            print(f"{name} has been installed")
        except (OSError, subprocess.CalledProcessError, StopIteration) as error:
            print(f"{name} cannot be installed and is skipped: {error}", file=sys.stderr)


if __name__ == "__main__":
    typer.run(main)
