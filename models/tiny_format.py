"""The files of models/tiny: its tokenizer, chat template, configuration and weights."""

import os
import shutil
import tempfile
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

END_OF_TEXT = "<|endoftext|>"
END_OF_TURN = "<|end|>"
SPECIAL_TOKENS = (END_OF_TEXT, END_OF_TURN, "<|system|>", "<|user|>", "<|assistant|>")
VOCABULARY = 4096
CONTEXT = 2048

# One turn is "<|role|>\n", the text, "<|end|>\n". No token is added before the first turn. Tools, their calls and answers
# are plain text as Hermes writes it, for trying tools out: the model was trained without any of them.
CHAT_TEMPLATE = """\
{%- if tools %}
{{- '<|system|>\\n' }}
{%- if messages[0]['role'] == 'system' and messages[0]['content'] %}
{{- messages[0]['content'] + '\\n\\n' }}
{%- endif %}
{{- '<tools>' }}
{%- for tool in tools %}
{{- '\\n' + (tool | tojson) }}
{%- endfor %}
{{- '\\n</tools>\\nA call: <tool_call>\\n{"name": ..., "arguments": {...}}\\n</tool_call><|end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message['role'] not in ['system', 'user', 'assistant', 'tool'] %}
{{- raise_exception('Unknown role: ' + message['role']) }}
{%- endif %}
{%- set content = message['content'] or '' %}
{%- if message['role'] == 'tool' %}
{{- '<|user|>\\n<tool_response>\\n' + content + '\\n</tool_response><|end|>\\n' }}
{%- elif message['tool_calls'] %}
{{- '<|' + message['role'] + '|>\\n' + content }}
{%- for call in message['tool_calls'] %}
{%- set function = call['function'] or call %}
{%- set arguments = function['arguments'] if function['arguments'] is string else function['arguments'] | tojson %}
{{- '' if loop.first and not content else '\\n' }}
{{- '<tool_call>\\n{"name": ' + (function['name'] | tojson) + ', "arguments": ' + arguments + '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|end|>\\n' }}
{%- elif not (tools and loop.first and message['role'] == 'system') %}
{{- '<|' + message['role'] + '|>\\n' + content + '<|end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|assistant|>\\n' }}
{%- endif %}
"""


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on some texts; it adds no token of its own accord."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(texts, bpe_trainer())
    return wrap_tokenizer(tokenizer)


def bpe_trainer() -> trainers.BpeTrainer:
    """A trainer whose vocabulary starts with the special tokens and all 256 bytes."""
    return trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )


def wrap_tokenizer(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """Give a bare tokenizer its special tokens and the chat template."""
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def new_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """An untrained model, 4.0 million parameters in size."""
    stops = tokenizer.convert_tokens_to_ids([END_OF_TEXT, END_OF_TURN])
    ids = {"bos_token_id": stops[0], "pad_token_id": stops[0], "eos_token_id": stops}
    model = LlamaForCausalLM(model_config(ids))
    model.generation_config = GenerationConfig(do_sample=True, temperature=0.8, top_p=0.95, **ids)
    return model


def model_config(ids: dict[str, int | list[int]]) -> LlamaConfig:
    """The shape of the model."""
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        **ids,
    )


def export(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write the model, in bfloat16, and its tokenizer; each file appears at once or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        rounded = LlamaForCausalLM(model.config)
        rounded.load_state_dict(model.state_dict())
        rounded.generation_config = model.generation_config
        rounded.to(torch.bfloat16).save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        tokenizer.backend_tokenizer.save(f"{scratch}/tokenizer.json", pretty=False)
        move_files(Path(scratch), folder)


def move_files(source: Path, target: Path) -> None:
    """Move all files of one folder into another, replacing each file in one step."""
    for path in sorted(source.iterdir()):
        arriving = target / f".{path.name}.new"
        shutil.copyfile(path, arriving)
        os.replace(arriving, target / path.name)
