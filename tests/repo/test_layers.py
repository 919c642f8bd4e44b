"""Which package may import which, and what must not be importable."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

from tests.support.tree import ROOT, run_python

# What a process without torch looks like, from the inside.
BLOCKER = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "transformers", "triton", "safetensors"}:
            raise ImportError(f"{name} is not installed here")
sys.meta_path.insert(0, Blocker())
"""
IMPORT_ALL = (
    BLOCKER
    + """
import importlib, pkgutil
count = 0
for root in PACKAGES:
    package = importlib.import_module(root)
    for module in pkgutil.walk_packages(package.__path__, root + "."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
            count += 1
print(count)
"""
)


def test_import_contracts_hold() -> None:
    """All contracts of pyproject.toml are kept (layers, pure core, no torch in gateway and scheduler)."""
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"Contracts: [4-9] kept, 0 broken", done.stdout), done.stdout


def test_every_module_imports_without_torch() -> None:
    """Gateway and scheduler, and all they stand on, import where torch and transformers do not exist."""
    packages = ["gateway_svc", "scheduler_svc", "svc_common", "block_manager", "protos"]
    done = run_python(f"PACKAGES = {packages!r}\n{IMPORT_ALL}")
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 15


def test_the_blocker_blocks() -> None:
    """The test above could fail: a module that needs torch does not import there."""
    done = run_python(BLOCKER + "import torch")
    assert done.returncode != 0
    assert "torch is not installed here" in done.stderr


def test_the_command_line_imports_without_torch() -> None:
    """`quire serve gateway` and `quire serve scheduler` run where torch does not exist: so does `import quire`."""
    done = run_python(BLOCKER + "import quire, quire.cli")
    assert done.returncode == 0, done.stderr


def test_kernels_is_not_a_package(tmp_path: Path) -> None:
    """transformers probes a top-level `kernels` (another package on PyPI): ours must never answer to that name."""
    assert not (ROOT / "kernels" / "__init__.py").exists()
    code = "import importlib.util as u; print(u.find_spec('kernels'), u.find_spec('paged_kernels') is not None)"
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    assert run_python(code, cwd=tmp_path, env=env).stdout.split() == ["None", "True"]


def test_transformers_sees_no_kernels_package() -> None:
    """Not even here, where the folder `kernels/` lies on the path."""
    assert importlib.util.find_spec("transformers"), "the worker's extra is part of the test environment"
    code = "from transformers.utils.import_utils import is_kernels_available as f; print(f())"
    assert run_python(code).stdout.strip() == "False"
