"""Builds manifests from deploy/kubernetes with the real Kustomize, which is part of `kubectl`."""

import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).resolve().parent / "kubernetes"
WORKERS = ("cpu", "gpu", "tensor-parallel")
"""Components of which a cell has one."""
ADDITIONS = ("disruption-budgets", "inference-pool", "keda", "network-policies", "pod-monitor")
"""Components that add resources and change none."""
_TIMEOUT_S = 60.0
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # of libyaml, where there is one


def build(folder: Path) -> list[dict[str, Any]]:
    """Manifests of a folder. Raises FileNotFoundError without kubectl, CalledProcessError with Kustomize's message as `stderr`."""
    command = ["kubectl", "kustomize", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
    return list(yaml.load_all(done.stdout, _LOADER))


def compose(*components: str, base: bool = True) -> list[dict[str, Any]]:
    """Manifests of the base with these components, in this order; errors as `build`."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made).resolve()
        source = os.path.relpath(FOLDER, folder)
        wanted: dict[str, Any] = {
            "apiVersion": "kustomize.config.k8s.io/v1beta1",
            "kind": "Kustomization",
            "resources": [f"{source}/base"] if base else [],
            "components": [f"{source}/components/{name}" for name in components],
        }
        (folder / "kustomization.yaml").write_text(yaml.safe_dump(wanted), encoding="utf-8")
        return build(folder)


def cell(worker: str, additions: Sequence[str] = (), *, mtls: bool = False) -> list[dict[str, Any]]:
    """Manifests of a cell, components in the order in which they change each other."""
    return compose(*additions, worker, *(["mtls"] if mtls else []))
