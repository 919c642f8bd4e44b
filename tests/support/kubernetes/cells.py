"""Cells as Kustomize builds them, once in a run of the tests, and what is in them.

Kustomize is part of `kubectl`, which no package registry has: tests are skipped without it.
"""

import functools
import re
import shutil
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from deploy import kustomize
from tests.support.kubernetes.validity import pod_templates

NEEDS_KUSTOMIZE = pytest.mark.skipif(
    shutil.which("kubectl") is None, reason="kubectl, which has Kustomize, is not installed"
)
Manifest = dict[str, Any]
CELLS = [(worker, full) for worker in kustomize.WORKERS for full in (False, True)]
SERVICES = ("gateway", "scheduler", "worker", "worker-cuda")


@functools.cache
def cell(worker: str, full: bool) -> tuple[Manifest, ...]:
    """A cell with its workers only, or with all components."""
    if not full:
        return tuple(kustomize.cell(worker))
    return tuple(kustomize.compose(*kustomize.ADDITIONS, worker, "model-image", "mtls"))


@functools.cache
def kserve() -> tuple[Manifest, ...]:
    return tuple(kustomize.compose("kserve", base=False))


def pods(manifests: Iterable[Manifest]) -> list[Manifest]:
    return [template for manifest in manifests for template in pod_templates(manifest)]


def containers(pod: Manifest) -> Iterator[tuple[str, Manifest]]:
    """Each container with the service that its image runs."""
    for container in pod["containers"]:
        name = re.fullmatch(r"quire-([\w-]+):\d+\.\d+\.\d+", container["image"])
        assert name and name[1] in SERVICES
        yield name[1].removesuffix("-cuda"), container


def every_container() -> Iterator[tuple[str, Manifest, Manifest]]:
    """(service, container, pod) of all cells."""
    for manifests in (*(cell(*of) for of in CELLS), kserve()):
        for pod in pods(manifests):
            for service, container in containers(pod):
                yield service, container, pod
