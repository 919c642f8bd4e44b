"""A simple synthetic language, and tiny models of it that are trained in seconds: one with an MTP head, and a smaller draft model.

A text is a chain of words of 3 to 6 tokens. A word is one of a few that may follow the last one: its first token is drawn, and the
others follow from it.
"""

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, DeepseekV3Config, LlamaConfig, PreTrainedConfig, PreTrainedModel

VOCAB_SIZE = 128
HIDDEN = 64
LAYERS = 2
_WORDS, _FOLLOWING = 96, 4
_ROWS, _LENGTH = 16, 64
_RATE = 4e-3


class Language:
    """The words, and which of them follow each."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        self._words = [[draw.randrange(2, VOCAB_SIZE) for _ in range(draw.randint(3, 6))] for _ in range(_WORDS)]
        self._next = [[draw.randrange(_WORDS) for _ in range(_FOLLOWING)] for _ in range(_WORDS)]

    def text(self, length: int, draw: random.Random) -> list[int]:
        """So many tokens."""
        found, word = [], draw.randrange(_WORDS)
        while len(found) < length:
            found += self._words[word]
            word = draw.choice(self._next[word])
        return found[:length]

    def batches(self, seed: int, count: int) -> Iterator[torch.Tensor]:
        """Token ids [rows, length]."""
        draw = random.Random(seed)
        for _ in range(count):
            yield torch.tensor([self.text(_LENGTH, draw) for _ in range(_ROWS)])


class _Head(nn.Module):
    """What an MTP head has beside its layer, under the checkpoint's names."""

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.enorm, self.hnorm, self.shared_head = norm(HIDDEN), norm(HIDDEN), nn.Module()
        self.shared_head.norm = norm(HIDDEN)
        self.eh_proj = nn.Linear(2 * HIDDEN, HIDDEN, bias=False)


def make_model(folder: Path, language: Language, num_batches: int) -> Path:
    """Train a model and its MTP head together, and write the checkpoint."""
    torch.manual_seed(0)
    config = _config(DeepseekV3Config, LAYERS + 1)
    model = AutoModelForCausalLM.from_config(config)
    config.num_hidden_layers = model.config.num_hidden_layers = model.model.config.num_hidden_layers = LAYERS
    head = _Head(type(model.model.norm))

    def loss(ids: torch.Tensor) -> torch.Tensor:
        states = model.model(ids).last_hidden_state
        of_model = _loss(model.lm_head(states[:, :-1]), ids[:, 1:])
        return of_model + 0.5 * _loss(_head_logits(model, head, states[:, :-2], ids[:, 1:-1]), ids[:, 2:])

    _train([*model.parameters(), *head.parameters()], loss, language.batches(1, num_batches))
    _save(model, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors |= {f"model.layers.{LAYERS}.{name}": tensor for name, tensor in head.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def make_draft_model(folder: Path, language: Language, num_batches: int) -> Path:
    """Train a model of one layer and a quarter of the width, and write the checkpoint."""
    torch.manual_seed(1)
    sizes = {
        "hidden_size": HIDDEN // 2,
        "intermediate_size": HIDDEN,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    model = AutoModelForCausalLM.from_config(
        LlamaConfig(vocab_size=VOCAB_SIZE, num_hidden_layers=1, tie_word_embeddings=False, **sizes)
    )

    def loss(ids: torch.Tensor) -> torch.Tensor:
        return _loss(model(ids).logits[:, :-1], ids[:, 1:])

    _train(list(model.parameters()), loss, language.batches(2, num_batches))
    _save(model, folder)
    return folder


def _config(cls: type[PreTrainedConfig], num_layers: int) -> PreTrainedConfig:
    return cls(
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        first_k_dense_replace=num_layers,
        q_lora_rank=48,
        kv_lora_rank=32,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
        max_position_embeddings=1024,
        bos_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=False,
    )


def _head_logits(model: PreTrainedModel, head: _Head, states: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    joined = torch.cat([head.enorm(model.model.embed_tokens(ids)), head.hnorm(states)], -1)
    x, places = head.eh_proj(joined), torch.arange(ids.shape[1])[None]
    out = model.model.layers[LAYERS](
        x,
        position_embeddings=model.model.rotary_emb(x, places),
        attention_mask=torch.full((ids.shape[1],) * 2, float("-inf")).triu(1)[None, None],
        position_ids=places,
    )
    logits: torch.Tensor = model.lm_head(head.shared_head.norm(out))
    return logits


def _loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return cross_entropy(logits.flatten(0, 1), ids.flatten())


def _train(
    parameters: list[nn.Parameter], loss: Callable[[torch.Tensor], torch.Tensor], batches: Iterator[torch.Tensor]
) -> None:
    optimizer = torch.optim.AdamW(parameters, _RATE)
    for ids in batches:
        optimizer.zero_grad()
        loss(ids).backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()


def _save(model: PreTrainedModel, folder: Path) -> None:
    model.save_pretrained(folder)
    Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCAB_SIZE)}, unk_token="t0")).save(
        str(folder / "tokenizer.json")
    )
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
