"""`python -m tests.models_page [--write]`: docs/models.md, made from the families that tests run with and from their docstrings.

A test counts for a family when it is parametrised by it: through `parametrize` or through a fixture of its module, by one of the
tuples of `tests/support/checkpoints.py`. What a family is, is read from its checkpoint's configuration.
"""

import argparse
import ast
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.support import checkpoints
from tests.support.state_shapes import STATE_SHAPES
from tests.support.windowed_shapes import SHAPES
from tests.support.wrapped_checkpoints import WRAPPED
from tests.worker.families.outcomes import Table
from tests.worker.families.page import section
from worker_svc.model.cache.cache_groups import groups_of
from worker_svc.settings import KV_CACHE_DTYPES

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "models.md"
FOLDERS = ("tests/worker/engine", "tests/worker/states", "tests/e2e")
REFUSALS = ROOT / "tests" / "worker" / "engine" / "test_start_up.py"

Function = ast.FunctionDef | ast.AsyncFunctionDef
# Numbers of requirements and issues say nothing here.
_REFERENCE = re.compile(r"^R\d+(, R\d+)*: | \((issue|R)[^)]*\)")
_TITLES = {
    "llama": "Llama 2, 3",
    "mistral": "Mistral",
    "qwen2": "Qwen2, 2.5",
    "qwen3": "Qwen3",
    "gemma2": "Gemma 2",
    "gemma3_text": "Gemma 3 (text)",
    "phi3": "Phi-3, 3.5, 4",
    "gpt2": "GPT-2",
    "gpt_neox": "GPT-NeoX, Pythia",
    "opt": "OPT",
    "mixtral": "Mixtral",
    "qwen3_moe": "Qwen3-MoE",
    "phimoe": "Phi-3.5-MoE",
    "gpt_oss": "gpt-oss",
    "deepseek_v3": "DeepSeek V3, R1",
    "glm4_moe_lite": "GLM-4.7-Flash",
    "llama4_text": "Llama 4 (text)",
    "mistral4": "Mistral Small 4",
    "cohere2": "Command A, R7B",
    "glm4_moe": "GLM-4.5, 4.6, 4.7",
    "gemma4_text": "Gemma 4 (text)",
    "gemma3n_text": "Gemma 3n (text)",
    "mimo_v2_flash": "MiMo-V2-Flash",
    "lfm2": "LFM2",
    "lfm2_moe": "LFM2-MoE",
    "jamba": "Jamba",
    "qwen3_next": "Qwen3-Next",
    "qwen3_5_text": "Qwen3.5 (text)",
    "qwen3_5_moe_text": "Qwen3.5-MoE (text)",
    "falcon_h1": "Falcon-H1",
    "nemotron_h": "Nemotron-H",
    "bamba": "Bamba",
    "granitemoehybrid": "Granite 4 (hybrid)",
    "kimi_linear": "Kimi Linear",
    "olmo_hybrid": "OLMo Hybrid",
}
_EXPERTS = ("num_local_experts", "n_routed_experts", "num_experts")
# Fields that say what has states.
_STATES = {
    "conv_L_cache": "short convolutions",
    "linear_num_key_heads": "gated delta nets",
    "linear_num_heads": "Kimi delta attention",
    "mamba_dt_rank": "Mamba",
    "mamba_chunk_size": "Mamba-2",
    "mamba_num_heads": "Mamba-2",
}
# Traits of families with configurations that are made from defaults, which takes transformers; a test compares them.
STATE_TRAITS = {
    "lfm2": "grouped-query attention, short convolutions",
    "lfm2_moe": "grouped-query attention, 2 of 4 experts, short convolutions",
    "jamba": "grouped-query attention, 2 of 4 experts, Mamba",
    "qwen3_next": "grouped-query attention, 2 of 4 experts, gated delta nets",
    "qwen3_5_text": "grouped-query attention, gated delta nets",
    "qwen3_5_moe_text": "grouped-query attention, 2 of 4 experts, gated delta nets",
    "falcon_h1": "grouped-query attention, Mamba-2",
    "nemotron_h": "grouped-query attention, 2 of 4 experts, Mamba-2",
    "bamba": "grouped-query attention, Mamba-2",
    "granitemoehybrid": "2 of 4 experts, Mamba-2",
    "kimi_linear": "latent attention (MLA), which keeps one narrow vector per token, 2 of 4 experts, Kimi delta attention",
    "olmo_hybrid": "gated delta nets",
}
_INTRODUCTION = """\
# Models

Quire runs decoder models from Hugging Face `transformers`. This page lists the families that tests run, what is checked of each,
and which models are refused. It is generated from the tests by `python -m tests.models_page --write`.

A model is a folder with `config.json`, `tokenizer.json` and `*.safetensors`:

```sh
quire doctor --model ~/Qwen3-0.6B      # can it be served?
quire plan --model ~/Qwen3-0.6B        # how much memory does it need?
quire up --model ~/Qwen3-0.6B
```

A model runs in its own class of `transformers`, with paged attention in place of its own attention; no family has model code in
Quire. So a decoder that is not listed here is served too, if every layer is attention through transformers'
`AttentionInterface`, or some have [states](#states) in transformers' cache instead or beside it. When a model is loaded, a
probe checks that each layer calls that interface exactly once, or has states, and asks only for what is supported: a causal
mask, a sliding window or chunks, passed to attention or visible in the mask, and attention sinks. Keys and values that differ
in width are cached in the wider one. Prefix masks, combined masks, masks that the model builds itself and unknown arguments of
attention are refused; the error names the layer.

## Families

Tests run each family as a small checkpoint with random weights. The numbers are those of the checks below the table.
"""
_NOTES = """\
## Notes

* **Sliding windows and chunks.** A layer with a window, or with chunks, never reads KV before it, so those blocks can be freed and
  reused. A model with a window in every layer needs window / block size + 2 blocks per sequence, under cache rules that free the
  others; chunks count as windows of their size. In a model that also has layers without either (Gemma 2 and 3, gpt-oss, Llama 4),
  layers are divided into cache groups, each with block tables of its own, so that the others keep only their windows
  ([below](#cache-groups)).
* **Latent attention (MLA).** A token's keys and values are made from one narrow vector. The cache keeps that vector and the rotary
  part, as one kv head; queries are mapped into its space and results out of it (the absorbed form of
  [DeepSeek-V2](https://arxiv.org/abs/2405.04434), decision [0045](decisions/0045-latents-in-the-cache.md)). DeepSeek-V3 keeps
  2 x 576 elements per token and layer instead of 2 x 192 for each of 128 heads. Long prompts compute more: 576 products per key and
  head instead of 192. `--no-latent-cache` keeps keys and values of each head, for comparisons.
* **Models with image input.** The text model in
  {wrapped}
  is served, with tokens equal to those of the whole model's `generate` for
  text. Vision towers and projectors are not read; the log names them. `POST /v1/chat/completions` refuses messages with image,
  audio or video parts with status 400. `--tensor-parallel` refuses some of these models.
* **Rotary scaling.** `longrope` (Phi-3) is fixed when the model is loaded, by `--max-model-len`: short factors if no sequence can
  be longer than the original length, else long ones. `dynamic` is refused, because it depends on the longest sequence of a batch.
* **Mixtures of experts.** On a CPU, experts of models in the form of Mixtral, Qwen2-MoE, Qwen3-MoE, GLM-4.5 and DeepSeek V3
  are [packed](performance.md#how-it-works-on-a-cpu), rounded by `--quantization` too, and keep the invariance contract;
  packed files are not kept of rounded experts. Other mixtures (Phi-3.5-MoE, gpt-oss, Llama 4, or with `--no-fuse`), and the
  parts of several ranks, run on the modules of `transformers`: there the last bits of logits may depend on the batch, so the
  contract is off on processors where products depend on the number of rows; the worker logs it. Tokens equal those of
  `generate` within rounding. [Several ranks](scale-out.md#mixtures-of-experts) divide the experts of Mixtral, Qwen2-MoE
  and Qwen3-MoE.
* **Embeddings.** They are pooled from the last hidden states of any model: the mean over the prompt's tokens, or the last
  token's. A mean needs the whole prompt, so it uses no prefix hits and starts over after a preemption.
* **KV cache.** `--kv-cache-dtype` is one of {dtypes}.
  Keys and values are rounded when they are stored; `auto` is the type that the model computes in.
  [`int8` and `fp8`](performance.md#kv-caches-of-8-bits) have a scale for each token and kv head; scales that a checkpoint has
  for its KV cache (`k_scale`, `v_scale`, `kv_cache_scheme`) are not needed and not used.

## Cache groups

Layers with the same window form cache groups of equally many layers, and all groups take blocks from one pool. A layer with twice
the kv heads of others counts as two. So many times the requests fit into the same memory as with one block table for all layers, by
the tokens of a request (blocks of {block_size}):

{groups}

`quire plan` says what fits for a model here. Policies of vLLM 2023 and 0.6.3 know one block table: start the worker with
`--no-cache-groups` for them, which keeps all blocks. Several stages (`--pipeline-parallel`) have one table too. Sequences of models
with windows do not move between workers; they are computed again. A prefix is a hit where the blocks within its windows are still
cached.

## States

Layers that are recurrent (gated delta nets of Qwen3-Next and Qwen3.5, Mamba-2 and Mamba of Nemotron-H, Granite 4, Falcon-H1,
Bamba and Jamba, Kimi Linear's delta attention) or convolve the last few tokens (LFM2) keep one state per sequence, however long
it is. A model with such layers runs like others: its prompts are cut into chunks, batched, cached, swapped and computed again.

The states of a sequence take a fixed number of blocks from the pool of the KV cache; the log, the memory report and `quire
plan` say how many. A cached prefix can end only where the states are kept too, at a *checkpoint*: at every
`--checkpoint-tokens` tokens and near the end of each prompt. The default distance is such that a checkpoint takes as many
blocks as the keys and values of so many tokens. Checkpoints are kept in blocks that are free, and overwritten like other cached
blocks.

{states}

This is for default configurations of transformers, with blocks of {block_size} tokens in bfloat16.

The model must have layers with attention too, each with keys and values of its own: Mamba, Falcon Mamba, RWKV and Zamba are
refused. Modules with states compute rows sequence by sequence with their own PyTorch code, so such a model is not fused into
one program. A module that takes no chunk after a state (Mamba of Jamba, which the probe finds out) computes the rest of a
chunked prompt token by token: `--max-num-batched-tokens` as large as the longest prompt avoids that. Results depend on how
prompts are cut into chunks in their last bits, so `--invariant` is refused. Several ranks and moves between workers are refused
for these models as well. [Draft tokens](drafts.md#models-with-states) work.

The states record how many tokens they have taken in. A row that begins a step elsewhere fails it with `STATES_OUT_OF_STEP` on a
CPU, and by itself on a GPU: states never take in a token twice.

## Quantized weights

`quantization_config` and the headers of the files are checked before weights are read. On a CPU, integers stay as they are stored
and are [multiplied as integers](performance.md#weights-of-eight-or-four-bits); on a GPU they are dequantized when loaded. FP8
(E4M3) stays as it is stored on both, and is multiplied with rows that are not rounded: results are those of the dequantized
weights in float32. With `--no-fuse`, and on a CPU with `--dtype float16`, all are dequantized.

| stored as | kept | dequantized |
|---|---|---|
| float32, bfloat16, float16 | with `--quantization` | |
| GGUF of `llama`, `qwen2`, `qwen3` | F16, BF16, Q8_0, Q4_0 to Q5_1, K-quants | |
| `compressed-tensors`: `pack-quantized`, `int-quantized`, `naive-quantized` | 4 and 8 bits; per tensor, channel, group | |
| `compressed-tensors`: `float-quantized`, `mxfp8-quantized` | FP8; per tensor, channel, group, block | |
| `compressed-tensors`: `mxfp4-pack-quantized`, `nvfp4-pack-quantized` | yes, in 8 bits | |
| `awq`, version `gemm` | 4 bits with zero points | |
| `gptq`, formats `gptq` and `gptq_v2` | 4 and 8 bits | matrices with `desc_act`: their groups follow activations |
| `fp8`, one scale per block or per matrix (`weight_scale_inv`; per matrix also `weight_scale`) | yes | |
| `mxfp4` (fused experts), `bitsandbytes`, `modelopt`, others | refused with `QUANTIZATION_UNSUPPORTED` | |

Numbers are kept exactly, with their scales and zero points, in groups of 16, 32, 64 or 128; a scale for more weights is
repeated for each 128. Other groups, experts that transformers merges into one tensor, and FP8 with scales of 256 or more are
dequantized, in float32 and then rounded to the type that the model computes in; the log names what is dequantized and why. Then a
matrix needs as much memory as an unquantized one. Activations and the KV cache are not rounded as a checkpoint's configuration
asks, be it per token (dynamic) or with stored scales (static); products with integers round each group of a row to 8 bits.
With `--dtype auto`, a float16 checkpoint of quantized weights computes in bfloat16 on a CPU.

With the built-in model, the perplexity of held-out text is within 0.25 % of what a format's own package has for the same file (25
stored forms), or the values that were packed (GPTQ, 5 forms); `--quantization int8` raises it by 0.05 %, `int4` by 2.9 %
([benchmarks](../benchmarks/README.md#perplexity-of-quantized-weights)). Schemes that round activations to 4 bits were not measured.

Fields of `quantization_config` that are not known, with a value that is not empty, are refused by name; so are tensors whose
types or shapes do not fit the configuration, and `--quantization` beside integers. Instead of a checkpoint that is refused, use
the model's unquantized checkpoint, or one of the formats above.
"""
_BLOCK_SIZE, _LENGTHS = 16, (1_000, 2_000, 8_000, 32_768)
_LEGEND = """\
`yes`: in `make test`; `long`: in `make test-long` only.
"""
_REFUSED = """\
## Refused

Encoders, and models that mix tokens other than by attention through that interface, are refused when loaded; the error names the
module. Tested: {types}, `t5`.
"""


def _groups_table() -> Iterator[str]:
    """Requests that fit at once in cache groups, as a multiple of those with one block table, by model and length."""
    yield "| shape | cache groups | " + " | ".join(f"{length:,}" for length in _LENGTHS) + " |"
    yield "|---" * (2 + len(_LENGTHS)) + "|"
    for name, windows in SHAPES.items():
        groups = groups_of(windows, _BLOCK_SIZE, _LENGTHS[-1])
        held = [groups.num_blocks(length, _BLOCK_SIZE) * groups.num_layers for length in _LENGTHS]
        ratios = [-(-length // _BLOCK_SIZE) * len(windows) / n for length, n in zip(_LENGTHS, held, strict=True)]
        shown = " | ".join(f"{ratio:.2f}" for ratio in ratios)
        yield f"| {name} | {len(groups.windows)} of {groups.num_layers} layers | {shown} |"


def _states_table() -> Iterator[str]:
    """What states take, by model type."""
    yield "| `model_type` | modules with states | layers with keys and values | blocks | MiB | tokens between checkpoints |"
    yield "|---|--:|--:|--:|--:|--:|"
    for name, (modules, layers, blocks, mib, tokens) in STATE_SHAPES.items():
        yield f"| `{name}` | {modules} | {layers} | {blocks} | {mib:.1f} | {tokens:,} |"


@dataclass(frozen=True, slots=True)
class Check:
    """A test that runs with `families`, of which `quick` in `make test`. `path`: below the root; `words`: its first sentence."""

    path: str
    name: str
    words: str
    families: tuple[str, ...]
    quick: frozenset[str]


# --- what tests say ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Source:
    """One test module: its functions, and its tuples of families by name, those of `checkpoints` included."""

    functions: tuple[Function, ...]
    tuples: Mapping[str, tuple[str, ...]]

    @classmethod
    def of(cls, source: str) -> "_Source":
        body = ast.parse(source).body
        tuples = {name: value for name, value in vars(checkpoints).items() if name.endswith("FAMILIES")}
        for node in body:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple) and _names_families(node.value):
                tuples[ast.unparse(node.targets[0])] = ast.literal_eval(node.value)
        return cls(tuple(node for node in body if isinstance(node, Function)), tuples)

    def families(self, expr: ast.expr) -> dict[str, bool]:
        """Families of the tuples that a list of parameters names; whether each is quick.

        Where some are marked as long, those that it asks for with `in` are not.
        """
        inner = [name for node in ast.walk(expr) if isinstance(node, ast.Compare) for name in self._named(node)]
        quick = {family for name in inner for family in self.tuples[name]}
        named = [family for name in self._named(expr) if name not in inner for family in self.tuples[name]]
        return {family: "mark.long" not in ast.unparse(expr) or family in quick for family in named}

    def _named(self, expr: ast.AST) -> list[str]:
        return [node.id for node in ast.walk(expr) if isinstance(node, ast.Name) and node.id in self.tuples]

    def families_of(self, node: Function, word: str) -> dict[str, bool]:
        """Of a function's decorators with `word`."""
        return {family: q for expr in _decorators(node, word) for family, q in self.families(expr).items()}

    def checks(self, path: str) -> Iterator[Check]:
        """Its tests that run with families, by themselves or by a fixture."""
        fixtures = {node.name: self.families_of(node, "fixture") for node in self.functions}
        for node in (node for node in self.functions if node.name.startswith("test_")):
            found = self.families_of(node, "parametrize")
            for argument in node.args.args:
                found |= fixtures.get(argument.arg, {})
            is_long = any(_decorators(node, "mark.long"))
            quick = frozenset(family for family, q in found.items() if q and not is_long)
            if found:
                yield Check(path, node.name, _first_sentence(node), tuple(found), quick)


def _names_families(node: ast.Tuple) -> bool:
    return all(isinstance(part, ast.Constant) and part.value in _TITLES for part in node.elts)


def _decorators(node: Function, word: str) -> Iterator[ast.expr]:
    return (expr for expr in node.decorator_list if word in ast.unparse(expr).partition("(")[0])


def _first_sentence(node: Function) -> str:
    text = _REFERENCE.sub("", " ".join((ast.get_docstring(node) or "").split()))
    return text[:1].upper() + text[1:].partition(". ")[0].rstrip(".")


def checks_in(source: str, path: str) -> list[Check]:
    """The checks of one test module."""
    return list(_Source.of(source).checks(path))


def collect(root: Path = ROOT) -> list[Check]:
    """All checks, in order of their files."""
    return [
        check
        for folder in FOLDERS
        for path in sorted((root / folder).glob("test_*.py"))
        for check in checks_in(path.read_text(encoding="utf-8"), path.relative_to(root).as_posix())
    ]


def refused(source: str) -> list[str]:
    """Model types that a test sees refused: the keys of REFUSED."""
    for node in ast.parse(source).body:
        if (
            isinstance(node, ast.Assign)
            and ast.unparse(node.targets[0]) == "REFUSED"
            and isinstance(node.value, ast.Dict)
        ):
            return sorted(ast.literal_eval(key) for key in node.value.keys if key is not None)
    return []


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


# --- the page ---------------------------------------------------------------------------------------------------------


def traits(config: Mapping[str, object]) -> str:
    """What sets the tested checkpoint's attention and layers apart, from its configuration."""
    return ", ".join(_traits(config)) or "multi-head attention"


def _traits(config: Mapping[str, object]) -> Iterator[str]:
    layer_types = config.get("layer_types")
    if config.get("sliding_window"):
        mixed = isinstance(layer_types, list) and "full_attention" in layer_types
        yield "windowed and full layers" if mixed else "sliding window in every layer"
    if config.get("attention_chunk_size"):
        yield "chunked layers, and full ones without positions"
    if config.get("num_key_value_heads", config.get("num_attention_heads", 0)) != config.get("num_attention_heads", 0):
        yield "grouped-query attention"
    if config.get("attn_logit_softcapping"):
        yield "soft-capped scores and logits"
    if config.get("query_pre_attn_scalar"):
        yield "custom query scale"
    if config["model_type"] in {"gpt_oss", "mimo_v2_flash"}:
        yield "attention sinks"
    if config.get("global_head_dim") or config["model_type"] == "mimo_v2_flash":
        yield "layers of two shapes"
    if config.get("num_kv_shared_layers"):
        yield "layers that read other layers' keys and values"
    if any("llama_4_scaling_beta" in str(value) for value in config.values()) or config.get("attn_temperature_tuning"):
        yield "queries scaled by position"
    if config.get("kv_lora_rank"):
        yield "latent attention (MLA), which keeps one narrow vector per token"
    if experts := next((config[name] for name in _EXPERTS if config.get(name)), None):
        yield f"{config.get('num_experts_per_tok') or config.get('num_experts_per_token')} of {experts} experts"
    yield from (words for field, words in _STATES.items() if field in config)


def _mark(check: Check, family: str) -> str:
    if family in check.quick:
        return "yes"
    return "long" if family in check.families else ""


def _table(checks: list[Check]) -> Iterator[str]:
    numbers = range(1, len(checks) + 1)
    yield "| family | `model_type` | tested with | " + " | ".join(str(number) for number in numbers) + " |"
    yield "|---|---|---|" + ":-:|" * len(checks)
    for family, title in _TITLES.items():
        marks = [_mark(check, family) for check in checks]
        words = STATE_TRAITS[family] if family in STATE_TRAITS else traits(checkpoints.config_of(family))
        yield f"| {title} | `{family}` | {words} | " + " | ".join(marks) + " |"


def page(checks: list[Check], refusals: list[str]) -> str:
    """The whole of docs/models.md."""
    named = [
        f"{i}. {check.words} ([{check.path.removeprefix('tests/')}::{check.name}](../{check.path}))"
        for i, check in enumerate(checks, start=1)
    ]
    groups = "\n".join(_groups_table())
    states, of_wholes = "\n".join(_states_table()), _code(WRAPPED)
    notes = _NOTES.format(
        dtypes=_code(KV_CACHE_DTYPES), groups=groups, states=states, wrapped=of_wholes, block_size=_BLOCK_SIZE
    )
    parts = [_INTRODUCTION, *_table(checks), "", _LEGEND, *named, "", notes, _REFUSED.format(types=_code(refusals))]
    return "\n".join([*parts, section(Table.read())])


def main(argv: list[str]) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.models_page", description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write docs/models.md instead of printing it")
    text = page(collect(), refused(REFUSALS.read_text(encoding="utf-8")))
    if parser.parse_args(argv).write:
        PAGE.write_text(text, encoding="utf-8")
    else:
        print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
