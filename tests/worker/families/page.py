"""The section of docs/models.md about all classes, from the outcomes in table.json. Imports neither torch nor transformers."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator

from tests.worker.families.classes import COMMON, is_text_decoder
from tests.worker.families.outcomes import EQUAL, REFUSED, UNKNOWN, Table, Trial

# What a refused class would need, by the words of its refusal; the first that matches counts.
_NEEDS = (
    (
        r"Mamba|Mixer|Delta|Recurrent|Rwkv|RWKV|xLSTM|ShortConv|Inkling|linear_attention|type conv|hybrid|its cache must have",
        "states or convolutions",
    ),
    (r"no layer of its own", "attention that several layers share"),
    (r"indexed_attention|compressed_|sparse", "sparse attention that selects or compresses keys"),
    (r"chunked_attention|mask of chunks", "chunked attention"),
    (r"num_kv_shared_layers", "keys and values shared between layers"),
    (r"caches of different shapes", "layers with caches of different shapes"),
    (r"instead of once", "several attention calls in a layer"),
    (r"its own, which is not|mask", "masks that the model builds itself"),
    (r"is not attention through AttentionInterface", "attention that is not called through `AttentionInterface`"),
)
_OTHER = "other"
_INTRODUCTION = """\
## All classes

`make test-families` tries every causal language model class of transformers {version}. A tiny model with random weights, made from
the defaults of its configuration class, is loaded as a worker loads it, and its greedy tokens are compared with those of `generate`
in float32, as in check 6 above. A class without a sliding window by default is also tried with one, if its configuration has the
field. No class gives other tokens without an error.
"""


def section(table: Table) -> str:
    """The section, from its heading to its table."""
    trials = [table.trials[name] for name in sorted(table.trials)]
    refused = [trial for trial in trials if trial.outcome == REFUSED]
    parts = [
        _INTRODUCTION.format(version=table.transformers),
        *_counts(trials),
        "\nWhat refused classes would need:\n",
        *_reasons(refused),
        "",
        "| `model_type` | class | outcome |\n|---|---|---|",
        *(f"| `{trial.model_type}` | `{trial.model_class}` | {_words(trial)} |" for trial in trials),
        "",
    ]
    return "\n".join(parts)


def _counts(trials: list[Trial]) -> Iterator[str]:
    """Outcomes of all classes, of those of text decoders, and of common families."""
    groups = {
        "all classes": trials,
        "text decoders": [trial for trial in trials if is_text_decoder(trial.model_type)],
        "common text families": [trial for trial in trials if trial.model_type in COMMON],
    }
    yield "| | classes | equal | refused | unknown |\n|---|--:|--:|--:|--:|"
    for name, group in groups.items():
        counts = Counter(trial.outcome for trial in group)
        share = f"{counts[EQUAL]} ({100 * counts[EQUAL] // len(group)} %)"
        yield f"| {name} | {len(group)} | {share} | {counts[REFUSED]} | {counts[UNKNOWN]} |"


def _reasons(refused: list[Trial]) -> Iterator[str]:
    groups: dict[str, list[str]] = {}
    for trial in refused:
        groups.setdefault(need_of(trial), []).append(trial.model_type)
    yield "| need | classes | common text families |\n|---|--:|---|"
    for need, names in sorted(groups.items(), key=lambda entry: -len(entry[1])):
        yield f"| {need} | {len(names)} | {_code(name for name in names if name in COMMON)} |"


def need_of(trial: Trial) -> str:
    """What a refused class would need."""
    return next((need for pattern, need in _NEEDS if re.search(pattern, trial.why)), _OTHER)


def _words(trial: Trial) -> str:
    """The outcome in a cell."""
    if trial.outcome == EQUAL:
        forms = "".join(f"; with {name}: {what}" for name, what in trial.forms.items())
        return f"{EQUAL}, {trial.num_tokens} tokens{forms}"
    why = re.sub(r"^\w+ cannot be served: |^--model model ", "", trial.why)
    return f"{trial.outcome}: {_cell(why)}"


def _cell(words: str) -> str:
    """Text for a cell of a table: no bars, and field names and module names as they are."""
    return re.sub(r"([|<>])", r"\\\1", words).replace("_", "\\_").replace("*", "\\*")


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
