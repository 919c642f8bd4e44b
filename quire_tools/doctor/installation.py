"""Checks of the installation: Python, package versions, conflicting packages, torch, CPU kernels."""

import importlib
import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Iterator

from packaging.requirements import Requirement

from paged_kernels import cpu_library
from quire import extras
from quire_tools.doctor.findings import Finding, ok, problem, warning

_SERVICES = {"gateway": "quire serve gateway", "scheduler": "quire serve scheduler", "worker": "quire serve worker"}
_CONFLICTS = {
    "xds-protos": "it overwrites the telemetry exporter's modules (opentelemetry/proto)",
    "grpcio-admin": "it brings xds-protos, which overwrites the telemetry exporter's modules",
    "grpcio-csds": "it brings xds-protos, which overwrites the telemetry exporter's modules",
    "kernels": "transformers finds it and would run other attention than ours",
}


def python() -> Iterator[Finding]:
    """Check the interpreter's version."""
    version, least = platform.python_version(), (3, 11)
    if sys.version_info < least:
        yield problem("Python", version, "install Python 3.11 or newer")
    else:
        yield ok("Python", f"{version} ({sys.executable})")


def packages(*, runs_services: bool = True) -> Iterator[Finding]:
    """Check required packages by service; missing ones are problems if this installation is to run the services."""
    if not extras.requirements():
        yield warning("packages", "quire itself is not installed, it runs from a folder", extras.install_command("all"))
        return
    yield from _group("packages", extras.requirements(), extras.install_command(), needed=True)
    for extra, command in _SERVICES.items():
        if own := extras.requirements(extra):
            to_do = extras.install_command(*_SERVICES)
            yield from _group(f"packages of `{command}`", own, to_do, needed=runs_services)


def _group(name: str, wanted: list[Requirement], to_do: str, *, needed: bool) -> Iterator[Finding]:
    missing, wrong, right = [], [], []
    for requirement in wanted:
        version = extras.version(requirement.name)
        if version is None:
            missing.append(requirement.name)
        elif not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{requirement.name} {version} (wanted {requirement.specifier})")
        else:
            right.append(f"{requirement.name} {version}")
    if wrong:
        yield problem(name, f"out of range: {', '.join(wrong)}", to_do)
    if missing:
        make = problem if needed else warning
        yield make(name, f"not installed: {', '.join(missing)}", to_do)
    if not wrong and not missing:
        yield ok(name, ", ".join(right))


def conflicts() -> Iterator[Finding]:
    """Check for packages that break others, or Quire."""
    found = [name for name in _CONFLICTS if extras.version(name) is not None]
    for name in found:
        yield problem("conflicting packages", f"{name} is installed: {_CONFLICTS[name]}", f"pip uninstall {name}")
    spec = importlib.util.find_spec("kernels")
    if "kernels" not in found and spec is not None and spec.origin is not None:
        yield problem("conflicting packages", f"{spec.origin} is imported as `kernels`", "take it off the module path")
    elif not found:
        yield ok("conflicting packages", "none")


def torch() -> Iterator[Finding]:
    """Check PyTorch, its CPU instructions and its GPUs."""
    if importlib.util.find_spec("torch") is None:
        yield warning("torch", "not installed: a worker needs it", extras.install_command("worker"))
        return
    module = importlib.import_module("torch")  # an optional package
    capability = module.backends.cpu.get_cpu_capability()
    yield ok("torch", f"{module.__version__}, {capability}, {module.get_num_threads()} threads")
    yield from _gpus(module)


def _gpus(module: object) -> Iterator[Finding]:
    cuda = module.cuda  # type: ignore[attr-defined]
    if not cuda.is_available():
        if shutil.which("nvidia-smi"):
            to_do = "install a torch with CUDA, or a newer driver (nvidia-smi says which CUDA it can do)"
            yield warning("GPU", "there is a driver, but this torch uses no GPU", to_do)
        else:
            yield ok("GPU", "none; models run on the CPU")
        return
    for number in range(cuda.device_count()):
        free, total = cuda.mem_get_info(number)
        name = cuda.get_device_name(number)
        yield ok("GPU", f"cuda:{number} {name}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free")
    if importlib.util.find_spec("triton") is None:
        yield problem("GPU kernels", "triton is not installed", extras.install_command("cuda"))


def kernels() -> Iterator[Finding]:
    """Check for compiled kernels for this CPU."""
    try:
        found = cpu_library.find_library(os.environ)
    except cpu_library.NoCompiledKernels as error:
        yield warning("CPU kernels", "none: a worker on CPU computes in plain torch, several times slower", str(error))
        return
    later = "" if found.path.exists() else ", when a worker first starts (about 20 s)"
    yield ok("CPU kernels", f"{found.origin}{later}")
