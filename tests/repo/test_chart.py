"""The Helm chart says what the Kustomize components say."""

import json
from collections.abc import Iterable
from typing import Any

import jsonschema
import pytest
import yaml

from deploy import chart, kustomize
from tests.support.kubernetes.cells import NEEDS_KUSTOMIZE, cell
from tests.support.kubernetes.charts import render

pytestmark = NEEDS_KUSTOMIZE
Manifest = dict[str, Any]


def _values(**changed: Any) -> Manifest:
    values = yaml.safe_load((chart.CHART / "values.yaml").read_text(encoding="utf-8")) | changed
    jsonschema.validate(values, json.loads((chart.CHART / "values.schema.json").read_text(encoding="utf-8")))
    return values


def _ordered(manifests: Iterable[Manifest]) -> list[Manifest]:
    return sorted(manifests, key=lambda m: (m["kind"], m["metadata"]["name"]))


def test_the_chart_is_as_kustomize_builds_it() -> None:
    """Fresh; and each kind of workers, with and without TLS, rendered with the default values is that cell."""
    files = {path.name: path.read_text(encoding="utf-8") for path in (chart.CHART / "templates").iterdir()}
    assert files == chart.templates(), "run python -m deploy.chart --write"
    every = dict.fromkeys(_values()["components"], True)
    none = dict.fromkeys(every, False)
    for worker in kustomize.WORKERS:
        rendered = [m for text in files.values() for m in render(text, _values(worker=worker, components=none))]
        assert _ordered(rendered) == _ordered(cell(worker, False))
        values = _values(worker=worker, mtls=True, components=every)
        rendered = [m for text in files.values() for m in render(text, values)]
        assert _ordered(rendered) == _ordered(kustomize.cell(worker, kustomize.ADDITIONS, mtls=True))


def test_values_of_the_chart_have_effect() -> None:
    """Replicas, images, model and its claim; a value of no such name is refused."""
    files = [path.read_text(encoding="utf-8") for path in (chart.CHART / "templates").iterdir()]
    images = {**_values()["images"], "workerCuda": "registry/worker:2"}
    values = _values(worker="tensor-parallel", tensorParallel=8, modelName="7", modelClaim="qwen", images=images)
    rendered = {(m["kind"], m["metadata"]["name"]): m for text in files for m in render(text, values)}
    group = rendered["LeaderWorkerSet", "quire-worker"]["spec"]["leaderWorkerTemplate"]
    assert group["size"] == 8
    assert group["workerTemplate"]["spec"]["containers"][0]["image"] == "registry/worker:2"
    assert group["workerTemplate"]["spec"]["volumes"][1]["persistentVolumeClaim"]["claimName"] == "qwen"
    assert rendered["ConfigMap", "quire-model"]["data"] == {"name": "7"}
    assert "PodDisruptionBudget" in {kind for kind, _ in rendered}
    assert "ScaledObject" not in {kind for kind, _ in rendered}
    with pytest.raises(jsonschema.ValidationError):
        _values(workers=3)
