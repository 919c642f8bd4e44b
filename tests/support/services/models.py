"""Text models for tests: the built-in one, a byte-level one of single bytes, and one with byte fallback (SentencePiece style)."""

import functools
import json
from pathlib import Path

import tokenizers
from tokenizers import decoders
from tokenizers import models as tokenizer_models

from gateway_svc.text.text_model import TextModel
from protos.common.v1 import common_pb2
from protos.worker.v1 import worker_pb2

TINY = Path(__file__).resolve().parents[3] / "models" / "tiny"


@functools.cache
def tiny_tokenizer() -> tokenizers.Tokenizer:
    """The built-in model's own tokenizer, as the library loads it."""
    return tokenizers.Tokenizer.from_file(str(TINY / "tokenizer.json"))


def tiny_bundle() -> bytes:
    """What a worker would make of the built-in model."""
    config = json.loads((TINY / "config.json").read_text())
    return worker_pb2.ModelBundle(
        tokenizer_json=(TINY / "tokenizer.json").read_bytes(),
        chat_template=(TINY / "chat_template.jinja").read_text(),
        special_tokens={"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"},
        generation_config_json=(TINY / "generation_config.json").read_text(),
        limits=common_pb2.ModelLimits(
            model="tiny", max_model_len=2048, vocab_size=config["vocab_size"], block_size=16, eos_token_ids=[0, 1]
        ),
    ).SerializeToString(deterministic=True)


@functools.cache
def tiny() -> TextModel:
    """The built-in model's text side."""
    return TextModel.from_bundle(tiny_bundle())


@functools.cache
def fallback_tokenizer() -> tokenizers.Tokenizer:
    """Metaspace words and <0xNN> byte tokens, decoded as Llama 2 does."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    for piece in ("▁Hello", "▁world", "lo", "é", "▁", "!", "日本"):
        vocab[piece] = len(vocab)
    tokenizer = tokenizers.Tokenizer(tokenizer_models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


@functools.cache
def fallback() -> TextModel:
    """The text side of that one."""
    return TextModel(tokenizers.Tokenizer.from_str(fallback_tokenizer().to_str()))
