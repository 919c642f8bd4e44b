"""Makes the Helm chart deploy/kubernetes/chart from the Kustomize base and components, so that both say the same.

    python -m deploy.chart --write     # needs kubectl

A resource that differs between kinds of workers, or with TLS, is there once for each variant, under a condition. What is set by
values is marked in `_marked`.
"""

import argparse
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from deploy import kustomize

CHART = kustomize.FOLDER / "chart"
_TITLE = "# Made by `python -m deploy.chart --write` from deploy/kubernetes.\n"
_LABEL = "app.kubernetes.io/component"
_IMAGES = {
    "quire-gateway": "images.gateway",
    "quire-scheduler": "images.scheduler",
    "quire-worker": "images.worker",
    "quire-worker-cuda": "images.workerCuda",
}
_NUMBERS = ("replicas.", "autoscaling.", "tensorParallel")
_VARIANTS = [(worker, mtls) for worker in kustomize.WORKERS for mtls in (False, True)]

Resource = dict[str, Any]
Variant = tuple[str, bool]


def templates() -> dict[str, str]:
    """Text of each template, by file name."""
    whole = {variant: kustomize.cell(variant[0], kustomize.ADDITIONS, mtls=variant[1]) for variant in _VARIANTS}
    owners = dict(_additions())
    texts: dict[str, str] = {}
    for key in dict.fromkeys(_id(resource) for resources in whole.values() for resource in resources):
        addition = owners.get(key)
        found = {v: next((r for r in resources if _id(r) == key), None) for v, resources in whole.items()}
        name = addition or _file_of(next(r for r in found.values() if r))
        text = "".join(_under(condition, body) for condition, body in _variants(found))
        wanted = [f".Values.components.{_camel(addition)}"] if addition else []
        texts[name] = texts.get(name, _TITLE) + _under(wanted, text)
    return {f"{name}.yaml": text for name, text in sorted(texts.items())}


def _additions() -> Iterator[tuple[tuple[str, str], str]]:
    """Each resource of an added component, with the component."""
    for addition in kustomize.ADDITIONS:
        for resource in kustomize.compose(addition, base=False):
            yield _id(resource), addition


def _id(resource: Resource) -> tuple[str, str]:
    return resource["kind"], resource["metadata"]["name"]


def _file_of(resource: Resource) -> str:
    if resource["apiVersion"].startswith("cert-manager.io"):
        return "certificates"
    return str(resource["metadata"]["labels"].get(_LABEL, "model"))


def _camel(name: str) -> str:
    first, *rest = name.split("-")
    return first + "".join(word.capitalize() for word in rest)


def _under(conditions: list[str], text: str) -> str:
    """`text` under nested conditions."""
    opened = "".join(f"{{{{- if {condition} }}}}\n" for condition in conditions)
    return opened + text + len(conditions) * "{{- end }}\n"


def _variants(found: dict[Variant, Resource | None]) -> Iterator[tuple[list[str], str]]:
    """The different texts of a resource, each with the conditions under which it is the one."""
    by_text: dict[str, list[Variant]] = {}
    for variant, resource in found.items():
        if resource is not None:
            by_text.setdefault(_text(resource), []).append(variant)
    for text, variants in by_text.items():
        workers = sorted({worker for worker, _ in variants})
        modes = {mtls for _, mtls in variants}
        assert len(variants) == len(workers) * len(modes), "a text's variants are a product"
        conditions = []
        if len(workers) < len(kustomize.WORKERS):
            conditions.append("has .Values.worker (list " + " ".join(f'"{worker}"' for worker in workers) + ")")
        if len(modes) == 1:
            conditions.append(".Values.mtls" if modes == {True} else "not .Values.mtls")
        yield conditions, text


def _text(resource: Resource) -> str:
    """A resource as YAML, with what values set as expressions of them."""
    text = yaml.safe_dump(_marked(resource), sort_keys=False, width=10_000)
    return "---\n" + re.sub(r"'@([\w.]+)@'", lambda mark: f"{{{{ .Values.{mark[1]}{_quoted(mark[1])} }}}}", text)


def _quoted(name: str) -> str:
    return "" if name.startswith(_NUMBERS) else " | quote"


def _marked(resource: Resource) -> Resource:
    """A copy with '@NAME@' for each value NAME."""
    key = _id(resource)
    marked: Resource = _walked(resource)
    if key == ("ConfigMap", "quire-model"):
        marked["data"]["name"] = "@modelName@"
    elif key == ("ScaledObject", "quire-worker"):
        marked["spec"] |= {"minReplicaCount": "@autoscaling.min@", "maxReplicaCount": "@autoscaling.max@"}
    elif key in {("Deployment", "quire-gateway"), ("Deployment", "quire-worker"), ("LeaderWorkerSet", "quire-worker")}:
        marked["spec"]["replicas"] = f"@replicas.{key[1].removeprefix('quire-')}@"
    if key[0] == "LeaderWorkerSet":
        marked["spec"]["leaderWorkerTemplate"]["size"] = "@tensorParallel@"
    return marked


def _walked(value: Any, name: str = "") -> Any:
    """A copy with marks for images and the claim."""
    if isinstance(value, dict):
        return {key: _walked(item, key) for key, item in value.items()}
    if isinstance(value, list):
        return [_walked(item) for item in value]
    if name == "image" and isinstance(value, str):
        return f"@{_IMAGES[value.partition(':')[0]]}@"
    return "@modelClaim@" if name == "claimName" else value


def main() -> None:
    """Write the templates."""
    parser = argparse.ArgumentParser(description="Makes the templates of the Helm chart.")
    parser.add_argument("--write", action="store_true", required=True)
    parser.parse_args()
    folder: Path = CHART / "templates"
    folder.mkdir(parents=True, exist_ok=True)
    made = templates()
    for old in set(folder.glob("*.yaml")) - {folder / name for name in made}:
        old.unlink()
    for name, text in made.items():
        (folder / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
