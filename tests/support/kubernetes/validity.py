"""Strict checks of Kubernetes manifests: built-in kinds against Kubernetes' schemas, custom ones against schemas.yaml."""

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml

VERSION = "1.37"
Manifest = dict[str, Any]


@functools.cache
def _custom() -> dict[str, Any]:
    text = Path(__file__).with_name("schemas.yaml").read_text(encoding="utf-8")
    return yaml.safe_load(text)


def check(manifest: Manifest) -> None:
    """Raises a ValidationError of jsonschema for what the API server would refuse or ignore."""
    known = _custom().get(manifest["kind"])
    if known is None:
        kubernetes_validate.validate(manifest, VERSION, strict=True)
        return
    metadata = {"type": "object", "required": ["name"]}
    properties = {"apiVersion": {"const": known["apiVersion"]}, "kind": {}, "metadata": metadata}
    whole = {"properties": {**properties, "spec": _closed(known["spec"])}, "required": ["metadata", "spec"]}
    jsonschema.validate(manifest, {**whole, "additionalProperties": False})
    for template in pod_templates(manifest):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": template}
        kubernetes_validate.validate(pod, VERSION, strict=True)


def _closed(schema: Any) -> Any:
    """The schema with no properties but those named, at each level that is not `open`."""
    if not isinstance(schema, dict):
        return schema
    closed = {key: value for key, value in schema.items() if key != "open"}
    if "properties" in schema:
        closed["properties"] = {name: _closed(of) for name, of in schema["properties"].items()}
        closed |= {"type": "object", "additionalProperties": False}
    if "items" in schema:
        closed["items"] = _closed(schema["items"])
    return closed


def pod_templates(manifest: Manifest) -> Iterator[Manifest]:
    """The specs of the pods that the manifest stands for."""
    known = _custom().get(manifest["kind"])
    if known is not None:
        for path in known.get("pods", []):
            template = functools.reduce(lambda found, key: found[key], path, manifest["spec"])
            yield template.get("spec", template)
    elif manifest["kind"] in {"Deployment", "StatefulSet"}:
        yield manifest["spec"]["template"]["spec"]
