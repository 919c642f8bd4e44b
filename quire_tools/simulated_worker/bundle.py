"""The simulated worker's bundle: a byte-level tokenizer without merges (one token per byte) and a chat template."""

import hashlib
import json
from typing import Any

from protos.common.v1 import common_pb2
from protos.worker.v1 import worker_pb2
from quire_tools.simulated_worker.settings import SimulatedWorkerSettings

END_OF_TEXT = 256
_SPECIAL = {"<|endoftext|>": END_OF_TEXT, "<|user|>": 257, "<|assistant|>": 258, "<|system|>": 259}

_CHAT_TEMPLATE = """\
{%- for message in messages %}
{{- '<|' + message['role'] + '|>' + message['content'] + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|assistant|>' }}
{%- endif %}
"""


def _byte_symbols() -> list[str]:
    """The printable symbol of each byte in byte-level BPE (Radford et al. 2019, GPT-2's encoder)."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    hidden = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + hidden.index(byte)) for byte in range(256)]


def tokenizer_json() -> bytes:
    """A `tokenizer.json` with ids 0..255 for the bytes and 256..259 for the special tokens."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    added = [
        {
            "id": token_id,
            "content": content,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for content, token_id in _SPECIAL.items()
    ]
    vocabulary = {symbol: byte for byte, symbol in enumerate(_byte_symbols())} | _SPECIAL
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }
    return json.dumps(tokenizer, ensure_ascii=False).encode()


def build(settings: SimulatedWorkerSettings) -> tuple[bytes, common_pb2.ModelLimits]:
    """The serialised bundle and the limits that refer to it."""
    model = f"simulated {settings.served_model_name} {settings.vocab_size} {settings.eos_probability}"
    limits = common_pb2.ModelLimits(
        model=settings.name,
        max_model_len=settings.max_model_len,
        vocab_size=settings.vocab_size,
        model_digest=hashlib.sha256(model.encode()).hexdigest(),
        block_size=settings.block_size,
        eos_token_ids=[END_OF_TEXT],
        dtype="float32",
    )
    bundle = worker_pb2.ModelBundle(
        tokenizer_json=tokenizer_json(),
        chat_template=_CHAT_TEMPLATE,
        special_tokens={"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"},
        generation_config_json=json.dumps({"eos_token_id": END_OF_TEXT}),
        limits=limits,
    ).SerializeToString(deterministic=True)
    limits.bundle_digest = hashlib.sha256(bundle).hexdigest()
    return bundle, limits
