"""The wire: generated code is what the protos say, and the protos explain themselves."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2

from tests.support.tree import ROOT, name_of

TOOLCHAIN = Path(sys.prefix) / "protoc"
CONTRACTS_OF_OTHERS = "routers"
PROTOS = sorted(ROOT.glob("protos/*/v1/*.proto"))
ARRAY = re.compile(r"\b(u?int8|u?int32|u?int64|float32|bool)\b")
OPAQUE = re.compile(
    r"\bOpaque\b|\bBytes of\b|\bSerialised\b|\bserialised\b|\bfile\b|\bAs given\b|tokenizer\.json", re.I
)


def protoc(*arguments: str) -> None:
    """Runs the pinned protoc; it lives apart because it wants protobuf 6."""
    if not (TOOLCHAIN / "grpc_tools").is_dir():
        pytest.skip(f"{TOOLCHAIN} has no grpc_tools; `make setup` installs the pinned toolchain there")
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I", ".", *arguments, *map(name_of, PROTOS)]
    env = {**os.environ, "PYTHONPATH": str(TOOLCHAIN)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_generated_code_is_fresh(tmp_path: Path) -> None:
    """`make protos` would change nothing and leave nothing behind."""
    protoc(f"--python_out={tmp_path}", f"--pyi_out={tmp_path}", f"--grpc_python_out={tmp_path}")
    made = {path.relative_to(tmp_path).as_posix(): path.read_bytes() for path in tmp_path.rglob("*_pb2*")}
    committed = {
        name_of(path): path.read_bytes() for path in ROOT.glob("protos/**/*_pb2*.py*") if path.suffix != ".pyc"
    }
    assert len(made) == 3 * len(PROTOS) > 0
    assert made.keys() == committed.keys(), "run `make protos`"
    stale = [name for name, content in made.items() if committed[name] != content]
    assert not stale, f"run `make protos`: {stale}"


@pytest.fixture(scope="module")
def descriptors(tmp_path_factory: pytest.TempPathFactory) -> list[descriptor_pb2.FileDescriptorProto]:
    """Our files with their comments."""
    out = tmp_path_factory.mktemp("descriptors") / "set.pb"
    protoc("--include_source_info", f"--descriptor_set_out={out}")
    return list(descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file)


def declared(file: descriptor_pb2.FileDescriptorProto) -> Iterator[tuple[tuple[int, ...], str, object]]:
    """(source path, full name, descriptor) of everything that needs a comment."""
    for i, service in enumerate(file.service):
        yield (6, i), service.name, service
        for j, method in enumerate(service.method):
            yield (6, i, 2, j), f"{service.name}.{method.name}", method
    for i, enum in enumerate(file.enum_type):
        yield from declared_enum((5, i), "", enum)
    for i, message in enumerate(file.message_type):
        yield from declared_message((4, i), "", message)


def declared_enum(path: tuple[int, ...], prefix: str, enum: descriptor_pb2.EnumDescriptorProto) -> Iterator:
    """The enum and its values."""
    yield path, prefix + enum.name, enum
    for j, value in enumerate(enum.value):
        yield (*path, 2, j), f"{prefix}{enum.name}.{value.name}", value


def declared_message(path: tuple[int, ...], prefix: str, message: descriptor_pb2.DescriptorProto) -> Iterator:
    """The message, its fields, real oneofs and what is nested in it."""
    if message.options.map_entry:
        return
    name = prefix + message.name
    yield path, name, message
    for j, field in enumerate(message.field):
        yield (*path, 2, j), f"{name}.{field.name}", field
    synthetic = {field.oneof_index for field in message.field if field.proto3_optional}
    for j, oneof in enumerate(message.oneof_decl):
        if j not in synthetic:
            yield (*path, 8, j), f"{name}.{oneof.name}", oneof
    for j, nested in enumerate(message.nested_type):
        yield from declared_message((*path, 3, j), name + ".", nested)
    for j, enum in enumerate(message.enum_type):
        yield from declared_enum((*path, 4, j), name + ".", enum)


def comments(file: descriptor_pb2.FileDescriptorProto) -> dict[tuple[int, ...], str]:
    """Leading comments by source path."""
    return {tuple(place.path): place.leading_comments.strip() for place in file.source_code_info.location}


def test_everything_declared_has_a_comment(descriptors: list[descriptor_pb2.FileDescriptorProto]) -> None:
    """Services, RPCs, messages, fields, oneofs, enums and values say what they are."""
    checked, bare = 0, []
    for file in descriptors:
        said = comments(file)
        for path, name, _ in declared(file):
            checked += 1
            if not said.get(path):
                bare.append(f"{file.name}: {name}")
    assert checked > 150
    assert not bare, bare


def test_bytes_fields_say_what_they_hold(descriptors: list[descriptor_pb2.FileDescriptorProto]) -> None:
    """An array names its element type (`int32[n]`); anything else says that it is opaque, a file or a message."""
    unclear, checked = [], 0
    for file in descriptors:
        said = comments(file)
        for path, name, field in declared(file):
            if not isinstance(field, descriptor_pb2.FieldDescriptorProto) or field.type != field.TYPE_BYTES:
                continue
            checked += 1
            if not (ARRAY.search(said[path]) or OPAQUE.search(said[path])):
                unclear.append(f"{name}: {said[path]}")
    assert checked > 20
    assert not unclear, unclear


def test_names_follow_the_style_guide(descriptors: list[descriptor_pb2.FileDescriptorProto]) -> None:
    """Package `quire.<folder>.v1`; enum zero is `<ENUM>_UNSPECIFIED`; fields are lower_snake_case."""
    wrong = []
    for file in descriptors:
        folder = file.name.split("/")[1]
        if folder != CONTRACTS_OF_OTHERS and file.package != f"quire.{folder}.v1":
            wrong.append(f"{file.name}: package {file.package}")
        for _, name, thing in declared(file):
            if isinstance(thing, descriptor_pb2.EnumDescriptorProto):
                prefix = re.sub(r"(?<!^)(?=[A-Z])", "_", thing.name).upper()
                wrong += [f"{name}.{v.name}" for v in thing.value if not v.name.startswith(prefix + "_")]
                wrong += [] if thing.value[0].name == f"{prefix}_UNSPECIFIED" else [f"{name}: zero value"]
            if isinstance(thing, descriptor_pb2.FieldDescriptorProto) and not re.fullmatch(
                r"[a-z][a-z0-9_]*", thing.name
            ):
                wrong.append(name)
    assert not wrong, wrong
