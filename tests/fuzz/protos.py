"""gRPC inputs: for any method of ours random bytes, messages filled from their descriptors, and valid ones with something wrong."""

import random
from collections.abc import Callable
from dataclasses import dataclass

from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message

from protos.inference.v1 import inference_pb2 as pb
from tests.fuzz import hostile

_BOUNDS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
    FieldDescriptor.CPPTYPE_ENUM: (-(2**31), 2**31 - 1),
}
_DEPTH = 4
Metadata = tuple[tuple[str, str | bytes], ...]


@dataclass(frozen=True, slots=True)
class Input:
    """One call. `kind`: how it was made, for the account of a run. `more`: what follows `raw` where the client streams."""

    kind: str
    path: str
    is_stream: bool
    raw: bytes
    metadata: Metadata = ()
    timeout_s: float = 30.0
    more: tuple[bytes, ...] | None = None


def call_input(rng: random.Random, method: MethodDescriptor, path: str) -> Input:
    """A call of that method."""
    kind, make = rng.choices(_KINDS, weights=_WEIGHTS)[0]
    raw = make(rng, method.input_type)
    metadata = _metadata(rng) if rng.random() < 0.15 else ()
    return Input(kind, path, method.server_streaming, raw, metadata, _timeout(rng))


def _timeout(rng: random.Random) -> float:
    return rng.choice((0.001, 0.01, 0.1)) if rng.random() < 0.03 else 30.0


def _metadata(rng: random.Random) -> Metadata:
    names = ("x-request-id", "idempotency-key", "traceparent", "tracestate", "authorization", "x-tenant-id", "x-none")
    found: list[tuple[str, str | bytes]] = []
    for _ in range(rng.randrange(1, 4)):
        value = rng.choice(
            [i for i in hostile.IDS if i.isascii() and "\t" not in i] + ["00-" + "f" * 32 + "-" + "0" * 16 + "-01"]
        )
        found.append((rng.choice(names), value))
    if rng.random() < 0.2:
        found.append(("junk-bin", rng.randbytes(rng.randrange(64))))
    return tuple(found)


# --- messages --------------------------------------------------------------------------------------------------------


def _random_bytes(rng: random.Random, kind: Descriptor) -> bytes:
    return hostile.raw(rng)


def _derived(rng: random.Random, kind: Descriptor) -> bytes:
    return _filled(rng, kind, _DEPTH).SerializeToString()


def _valid_but_one(rng: random.Random, kind: Descriptor) -> bytes:
    """One or two hostile fields in what would be taken."""
    message = _valid(rng, kind)
    for _ in range(rng.randrange(1, 3)):
        _spoil(rng, message)
    return message.SerializeToString()


def _accepted(rng: random.Random, kind: Descriptor) -> bytes:
    return _valid(rng, kind).SerializeToString()


def _mutated(rng: random.Random, kind: Descriptor) -> bytes:
    """Flipped bits, pieces cut out or put in, unknown fields, wrong wire types."""
    raw = bytearray(_valid(rng, kind).SerializeToString())
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(raw) + 1)
        change = rng.randrange(4)
        if change == 0 and at < len(raw):
            raw[at] ^= 1 << rng.randrange(8)
        elif change == 1:
            del raw[at : at + rng.randrange(4)]
        elif change == 2:
            raw[at:at] = rng.randbytes(rng.randrange(1, 6))
        else:
            raw += bytes(
                [rng.choice((0x08, 0x0A, 0x0D, 0x12, 0x1B, 0x7A, 0xF8)), rng.randrange(256), rng.randrange(256)]
            )
    return bytes(raw)


def _many(rng: random.Random, kind: Descriptor) -> bytes:
    """A repeated field with up to a million entries."""
    message = _valid(rng, kind)
    count = rng.choice((10_000, 100_000, 1_000_000)) if rng.random() < 0.2 else rng.choice((17, 257, 4_097))
    if isinstance(message, pb.GenerateRequest | pb.ChatRequest):
        lists = (message.stop.stop_strings, message.sampling.bad_words, message.choice.choices)
        rng.choice(lists).extend(["a"] * count)
    elif isinstance(message, pb.DetokenizeRequest):
        message.token_ids.extend([1] * count)
    return message.SerializeToString()


_Make = Callable[[random.Random, Descriptor], bytes]
_KINDS: list[tuple[str, _Make]] = [
    ("random bytes", _random_bytes),
    ("derived", _derived),
    ("valid but one field", _valid_but_one),
    ("mutated bytes", _mutated),
    ("valid", _accepted),
    ("too many", _many),
]
_WEIGHTS = [15, 30, 30, 15, 9, 1]


def _filled(rng: random.Random, kind: Descriptor, depth: int) -> Message:
    message: Message = message_factory.GetMessageClass(kind)()
    for field in kind.fields:
        if rng.random() < 0.35:
            _set(rng, message, field, depth)
    return message


def _spoil(rng: random.Random, message: Message) -> None:
    """One field anywhere inside."""
    while True:
        field = rng.choice(message.DESCRIPTOR.fields) if message.DESCRIPTOR.fields else None
        if field is None:
            return
        inner = field.message_type is not None and not field.is_repeated
        if not inner or rng.random() < 0.3:
            _set(rng, message, field, _DEPTH)
            return
        message = getattr(message, field.name)
        message.SetInParent()


def _set(rng: random.Random, message: Message, field: FieldDescriptor, depth: int) -> None:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        _set_map(rng, getattr(message, field.name), field.message_type)
    elif field.is_repeated:
        count = rng.choice((0, 1, 2, 3)) if rng.random() < 0.95 else rng.choice((17, 65, 130))
        values = [_value(rng, field, depth) for _ in range(count)] if depth else []
        getattr(message, field.name).extend(value for value in values if value is not None)
    elif field.message_type is not None:
        if depth:
            getattr(message, field.name).CopyFrom(_filled(rng, field.message_type, depth - 1))
    else:
        setattr(message, field.name, _value(rng, field, depth))


def _set_map(rng: random.Random, target: object, entry: Descriptor) -> None:
    key, value = entry.fields_by_name["key"], entry.fields_by_name["value"]
    for _ in range(rng.choice((1, 2, 3, 20))):
        target[_value(rng, key, 0)] = _value(rng, value, 0)  # type: ignore[index]


def _value(rng: random.Random, field: FieldDescriptor, depth: int) -> object:
    if field.message_type is not None:
        return _filled(rng, field.message_type, depth - 1)
    if field.cpp_type in _BOUNDS:
        return _whole(rng, field)
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return rng.random() < 0.5
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return hostile.text(rng, field.name) if field.type == FieldDescriptor.TYPE_STRING else hostile.raw(rng)
    return hostile.real(rng)


def _whole(rng: random.Random, field: FieldDescriptor) -> int:
    if field.enum_type is not None and rng.random() < 0.7:
        return int(rng.choice(field.enum_type.values).number)
    return hostile.integer(rng, *_BOUNDS[field.cpp_type])


def _valid(rng: random.Random, kind: Descriptor) -> Message:
    """One that is taken, with a short output."""
    message: Message = message_factory.GetMessageClass(kind)()
    if isinstance(message, pb.CountTokensRequest):
        message.generate.CopyFrom(_valid(rng, pb.GenerateRequest.DESCRIPTOR))
    elif isinstance(message, pb.GenerateRequest | pb.ChatRequest):
        message.stop.max_tokens = rng.randrange(1, 5)
        message.sampling.n = rng.choice((1, 1, 2))
    if isinstance(message, pb.GenerateRequest):
        message.text = "ab"
    elif isinstance(message, pb.ChatRequest):
        message.messages.add(role="user", content="ab")
    elif isinstance(message, pb.EmbedRequest):
        message.inputs.add(text="ab")
    elif isinstance(message, pb.TokenizeRequest):
        message.text = "ab"
    return message
