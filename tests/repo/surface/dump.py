"""Prints the surface of the checkout in the working directory, whatever its modules are called: also that of older commits.

Run as a file, with only the product on the path: nothing of tests is imported.
"""

import ast
import dataclasses
import enum
import importlib
import inspect
import json
import re
import sys
import tomllib
import typing
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import typer
from google.protobuf.descriptor import Descriptor, FieldDescriptor, FileDescriptor
from typer.testing import CliRunner

_READ = ("trace_names.py", "svc_common/reasons.py", "openapi.py", "tour/route.py")
_DEFINES = re.compile(r"MetricSpec\(\n|^class \w+\((?:enum\.)?\w*Enum\)", re.M)
_SERVICES = ("gateway_svc", "scheduler_svc", "worker_svc", "svc_common", "quire", "quire_tools")
_LITERALS = {
    "variable": re.compile(r"(?:QUIRE|OTEL|OMP|GOMP|KMP|HF|XDG|OPENAI|TRITON|MALLOC|CUDA)_[A-Z0-9_]+|CXX"),
    "header": re.compile(r"(?:x|quire|retry|idempotency)-[a-z][a-z-]*[a-z]"),
    "path": re.compile(r"/(?:[\w{}:.-]*[\w}]/?)*"),
}
_MAY_HAVE_LITERALS = re.compile(
    r"LOGGER|(?:QUIRE|OTEL|OMP|KMP|HF|XDG|OPENAI|TRITON|MALLOC|CUDA)_|CXX|\b(?:x|quire|retry|idempotency)-"
)
_FIELD_KINDS = {
    value: name.removeprefix("TYPE_").lower()
    for name, value in vars(FieldDescriptor).items()
    if name.startswith("TYPE_")
}


def modules() -> dict[str, ModuleType]:
    """The modules that define what is printed, imported; most others, torch among them, need not be."""
    found = {}
    for package in ("protos", "block_manager", *_SERVICES):
        for path in Path(package).rglob("*.py"):
            if package == "protos" or str(path).endswith(_READ) or _DEFINES.search(path.read_text(encoding="utf-8")):
                name = ".".join(path.with_suffix("").parts)
                found[name] = importlib.import_module(name)
    return found


def commands(command: Any, name: str) -> Iterator[str]:
    """Commands with their arguments, options, kinds and defaults."""
    yield f"command {name}"
    for option in command.params:
        if option.name == "help":
            continue
        names = ", ".join([*option.opts, *option.secondary_opts])
        kind = "switch" if getattr(option, "is_flag", False) else _kind(option)
        default = option.default if isinstance(option.default, str | int | float | bool) else ""
        default = getattr(default, "value", default)
        shown = "" if default in ("", False) else f" = {default}"
        variable = f" ${option.envvar}" if option.envvar else ""
        hidden = " hidden" if getattr(option, "hidden", False) else ""
        yield f"option {name} {names}: {kind}{shown}{variable}{hidden}"
    for child in getattr(command, "table", getattr(command, "commands", {})):
        _, found, _ = command.resolve_command(command.make_context(name, [child], resilient_parsing=True), [child])
        yield from commands(found, f"{name} {child}")


def _kind(option: Any) -> str:
    wanted = option.type_descriptor.annotation
    part = next((part for part in typing.get_args(wanted) if part is not type(None)), wanted)
    if inspect.isclass(part) and issubclass(part, enum.Enum):
        text = "|".join(str(member.value) for member in part)
    else:
        text = getattr(part, "__name__", "text").lower()
    bounds = [
        f"{bound:g}" if bound is not None else ""
        for bound in (getattr(option, "min", None), getattr(option, "max", None))
    ]
    span = f" {bounds[0]}..{bounds[1]}" if any(bounds) else ""
    return f"{text}{span}{'...' if getattr(option, 'multiple', False) or option.nargs == -1 else ''}"


def metrics(loaded: dict[str, ModuleType]) -> Iterator[str]:
    """Metrics with kind, unit and labels."""
    for spec in _instances(loaded, "MetricSpec"):
        labels = ", ".join(["model_name"] * spec.of_model + list(spec.labels))
        buckets = f" {len(spec.buckets)} buckets to {spec.buckets[-1]:g}" if spec.buckets else ""
        yield f"metric {spec.name}: {spec.kind.value}, {spec.unit}, labels ({labels}){buckets}"


def _instances(loaded: dict[str, ModuleType], cls: str) -> list[Any]:
    found = {}
    for module in loaded.values():
        for value in vars(module).values():
            for item in value if isinstance(value, tuple | list) else [value]:
                if type(item).__name__ == cls:
                    found[id(item)] = item
    return list(found.values())


def names(loaded: dict[str, ModuleType]) -> Iterator[str]:
    """Names in traces, reasons of errors, of waiting and of other enums with values in capitals, Python's public API."""
    [of_traces] = (module for name, module in loaded.items() if name.endswith(".trace_names"))
    for value in vars(of_traces).values():
        if isinstance(value, str) and not value.startswith(("Names in", "svc_common")) and "/" not in value:
            yield f"trace {value}"
    for status, reasons in loaded["svc_common.reasons"].REASONS.items():
        yield from (f"reason {status} {reason}" for reason in reasons)
    for module in loaded.values():
        for cls in vars(module).values():
            if inspect.isclass(cls) and issubclass(cls, enum.Enum) and cls.__module__ == module.__name__:
                words = sorted(str(member.value) for member in cls if isinstance(member.value, str))
                yield from (f"word {word}" for word in words if re.fullmatch(r"[A-Z][A-Z_]+", word))


def python_api(loaded: dict[str, ModuleType]) -> Iterator[str]:
    """What `quire` exports, with parameters of functions and public methods, and fields of dataclasses."""
    quire = importlib.import_module("quire")
    for name in quire.__all__:
        value = getattr(quire, name)
        if dataclasses.is_dataclass(value):
            yield from (f"python {name}.{field.name}" for field in dataclasses.fields(value))
        for method, function in inspect.getmembers(value, callable) if inspect.isclass(value) else [("", value)]:
            public = method == "__init__" or not method.startswith("_")
            if public and inspect.isroutine(function):
                yield f"python {name}{'.' if method else ''}{method}({', '.join(inspect.signature(function).parameters)})"
        yield f"python {name}"


def protos(loaded: dict[str, ModuleType]) -> Iterator[str]:
    """Methods and messages of the wire."""
    files: list[FileDescriptor] = [
        m.DESCRIPTOR for n, m in loaded.items() if n.startswith("protos.") and hasattr(m, "DESCRIPTOR")
    ]
    for file in files:
        for service in file.services_by_name.values():
            for method in service.methods:
                yield f"rpc {service.full_name}/{method.name}({method.input_type.full_name}) -> {method.output_type.full_name}"
        for message in file.message_types_by_name.values():
            yield from _fields(message)
        for kind in file.enum_types_by_name.values():
            yield from (f"enum {kind.full_name} {value.name} = {value.number}" for value in kind.values)


def _fields(message: Descriptor) -> Iterator[str]:
    for field in message.fields:
        kind = field.message_type or field.enum_type
        yield f"field {message.full_name}.{field.name} = {field.number} {kind.full_name if kind else _FIELD_KINDS[field.type]}"
    for nested in message.nested_types:
        yield from _fields(nested)
    for kind in message.enum_types:
        yield from (f"enum {kind.full_name} {value.name} = {value.number}" for value in kind.values)


def literals() -> Iterator[str]:
    """Environment variables, headers, paths of HTTP and names of loggers, as the code writes them."""
    for name in (*_SERVICES, "kernels"):
        for path in Path(name).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            if name != "gateway_svc" and not _MAY_HAVE_LITERALS.search(text):
                continue
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    kinds = [kind for kind, pattern in _LITERALS.items() if pattern.fullmatch(node.value)]
                    yield from (f"{kind} {node.value}" for kind in kinds if kind != "path" or name == "gateway_svc")
                elif isinstance(node, ast.Assign) and "LOGGER" in text and "LOGGER" in ast.unparse(node.targets[0]):
                    yield f"logger {ast.unparse(node.value)}"


def openapi(loaded: dict[str, ModuleType]) -> Iterator[str]:
    """Routes and fields of OpenAI's API, as its document describes them."""
    document = loaded["gateway_svc.openapi"].document()
    for path, methods in document["paths"].items():
        yield from (f"route {method.upper()} {path}" for method in methods)
    for name, schema in document["components"]["schemas"].items():
        yield from (f"json {name}.{field}" for field in schema.get("properties", {}))


def policies(loaded: dict[str, ModuleType]) -> Iterator[str]:
    """Presets with their keys and defaults, and the stops of the tour."""
    presets = json.loads(CliRunner().invoke(importlib.import_module("quire.cli").app, ["policies", "--json"]).stdout)
    for preset, keys in presets.items():
        yield from (f"policy {preset} {key} = {json.dumps(value)}" for key, value in keys.items())
    route = next(module for name, module in loaded.items() if name.endswith(".tour.route"))
    yield from (f"tour {stop}" for stop in route.STOPS)


def project() -> Iterator[str]:
    """Targets of make, and extras of the distribution."""
    targets = re.findall(r"^\.PHONY: ([a-z-]+)$", Path("Makefile").read_text(encoding="utf-8"), re.M)
    described = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    yield from (f"make {target}" for target in targets)
    yield from (f"extra {extra}" for extra in described["optional-dependencies"])


def lines() -> list[str]:
    """All of it, sorted, each once."""
    loaded = modules()
    root = typer.main.get_command(importlib.import_module("quire.cli").app)
    parts = (metrics, names, python_api, protos, openapi, policies)
    found = {*commands(root, "quire"), *literals(), *project(), *(line for part in parts for line in part(loaded))}
    return sorted(found)


if __name__ == "__main__":
    sys.path[:0] = [".", "kernels"]
    sys.stdout.write("\n".join(lines()) + "\n")
