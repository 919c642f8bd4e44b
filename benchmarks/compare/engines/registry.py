"""All engines, in the order of the tables."""

import shlex
from collections.abc import Callable, Mapping, Sequence

from benchmarks.compare.engines.base import Engine, Host
from benchmarks.compare.engines.llamacpp import FORMS, LlamaCppServer
from benchmarks.compare.engines.offline import OfflineEngine, Program
from benchmarks.compare.engines.openvino import OpenVINOProgram
from benchmarks.compare.engines.quire import QuireProgram, QuireServer
from benchmarks.compare.engines.server import Server, ServerEngine
from benchmarks.compare.engines.transformers import TransformersProgram
from benchmarks.compare.engines.vllm import VllmProgram, VllmServer
from benchmarks.compare.shapes import ModelShape

QUIRE, QUIRE_HTTP, QUIRE_OFFLINE = "quire", "quire-http", "quire-offline"


def engines(host: Host, shape: ModelShape, variants: Mapping[str, str], options: str = "") -> dict[str, Engine]:
    """All engines by name.

    `options`: options of `quire up` for every stack; `variants`: more stacks by name, with further ones.
    """
    common = shlex.split(options)
    servers: list[Server] = [
        QuireServer(host, QUIRE, "grpc", common),
        QuireServer(host, QUIRE_HTTP, "http", common),
        *(
            QuireServer(host, f"{QUIRE}-{name}", "grpc", [*common, *shlex.split(more)])
            for name, more in variants.items()
        ),
        VllmServer(host),
        *(LlamaCppServer(host, shape.kv_token_bytes, form) for form in ("", *FORMS)),
    ]
    programs: list[Program] = [
        QuireProgram(host, QUIRE_OFFLINE, {}),
        VllmProgram(host),
        OpenVINOProgram(host),
        TransformersProgram(host),
    ]
    made: list[Engine] = [ServerEngine(server, shape.vocab_size) for server in servers]
    made += [OfflineEngine(program, shape.vocab_size) for program in programs]
    return {engine.name: engine for engine in made}


def reference(host: Host, shape: ModelShape) -> OfflineEngine:
    """Quire in process without a prefix cache, to compute requests alone."""
    program = QuireProgram(host, "reference", {"enable_prefix_caching": False})
    return OfflineEngine(program, shape.vocab_size)


def is_quire(name: str) -> bool:
    """True if it is Quire in some form."""
    return name == QUIRE or name.startswith(f"{QUIRE}-")


def chosen(all_engines: Mapping[str, Engine], names: Sequence[str], say: Callable[[str], None]) -> list[Engine]:
    """Those named that can run, in table order; says why others cannot. Raises KeyError for an unknown name."""
    for name in names:
        _ = all_engines[name]
    found = []
    for engine in all_engines.values():
        if engine.name not in names:
            continue
        if why := engine.missing():
            say(f"{engine.name} is skipped: {why}")
        else:
            found.append(engine)
    return found
