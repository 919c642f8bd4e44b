"""Tries one causal language model class: a tiny random checkpoint on the real engine, against `generate`.

`tried` runs in a process of its own (`table.py`): models may crash, hang and leave settings of transformers changed.
"""

import math
import random
import re
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType

import torch
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from svc_common.errors import ConfigError
from tests.support.worker.driver import make_engine
from tests.support.worker.generated import Generated
from tests.worker.engine.families import SPARE, Family, World, check_lives, is_diverse, prompts_of
from tests.worker.families.forms import DEFAULT, forms_of
from tests.worker.families.outcomes import DIFFERENT, EQUAL, FAULTS, RAISED, REFUSED, UNKNOWN, Outcome, Trial
from tests.worker.families.tiny_checkpoints import save_tiny
from tests.worker.families.tiny_configs import Fields

NUM_TOKENS, NUM_LIVES = 12, 2
SEEDS = range(6)
_MAX_MODEL_LEN = 1024  # for configurations without a length
_LAST_TOKENS = 130
_DISTANCES = (1, 8, 15, 17, 22, 23, 24, 31, 33, 45, 46, 47, 48, 64, 90, 129)
# An engine of blocks of 16 tokens that loses a block behind the last one should be noticed.
_LEAST_REACH = 17
_SEEN = 1e-3


class NoTrialError(Exception):
    """There is nothing to compare with; the message says why."""


class RepeatsError(Exception):
    """The tiny model makes few different tokens: a comparison with these would not count."""


def tried(model_type: str) -> Trial:
    """The outcome of one class in all its forms; never raises for what a model does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            forms = forms_of(model_type)
        except Exception as error:
            return _trial(model_type, Outcome(UNKNOWN, f"no tiny configuration: {_line(error)}"))
        plain = outcome_of(forms.pop(DEFAULT))
        found = {name: outcome_of(form) for name, form in forms.items()} if plain.outcome == EQUAL else {}
    wrong = [replace(one, why=f"{name}: {one.why}") for name, one in found.items() if one.outcome in FAULTS]
    others = {name: f"{one.outcome} {one.why}".strip() for name, one in found.items()}
    return _trial(model_type, wrong[0] if wrong else plain, others)


def _trial(model_type: str, found: Outcome, forms: Mapping[str, str] = MappingProxyType({})) -> Trial:
    cls = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    return Trial(model_type, cls, found.outcome, found.why, found.num_tokens, found.reach, dict(forms))


def outcome_of(fields: Fields) -> Outcome:
    """The outcome of one configuration, with the first seed whose model does not repeat itself."""
    repeats = Outcome(UNKNOWN, "the tiny model repeats itself")
    return next((one for seed in SEEDS if (one := _outcome(fields, seed)) is not None), repeats)


def _outcome(fields: Fields, seed: int) -> Outcome | None:
    """The outcome with one seed; None if that model repeats itself."""
    with TemporaryDirectory() as folder:
        try:
            return _compared(Family(str(fields["model_type"]), _saved(fields, Path(folder) / "model", seed)))
        except ConfigError as error:
            return Outcome(REFUSED, _reason(error))
        except NoTrialError as error:
            return Outcome(UNKNOWN, str(error))
        except RepeatsError:
            return None
        except AssertionError as error:
            return Outcome(DIFFERENT, _line(error))
        except Exception as error:
            return Outcome(RAISED, _line(error))


def _saved(fields: Fields, path: Path, seed: int) -> Path:
    """A tiny random checkpoint. Raises NoTrialError if none can be made."""
    try:
        return save_tiny(fields, path, seed)
    except Exception as error:
        raise NoTrialError(f"no tiny model: {_line(error)}") from error


def _compared(family: Family) -> Outcome:
    """The outcome if tokens are equal. Raises AssertionError if they differ, and what the loader raises."""
    try:
        engine = _engine(family.path)
    except ConfigError:
        raise
    except Exception as error:
        expected_of(family)  # what transformers cannot run itself is no fault of the loader
        raise error
    expected = expected_of(family)
    try:
        reach = reach_of(family.reference)
    except Exception as error:
        raise NoTrialError(f"generate fails: {_line(error)}") from error
    if reach < _LEAST_REACH:
        raise NoTrialError(f"the tiny model depends on its last {reach} tokens alone")
    world = World(family.name, engine, family.reference, prompts_of(1), expected)
    lives = check_lives(world, seeds=range(NUM_LIVES), num_tokens=NUM_TOKENS, poisoned=True)
    return Outcome(EQUAL, "", lives.num_tokens, reach)


def _engine(path: Path):
    """As a worker loads it; a configuration that gives no length gets one, as its refusal says."""
    try:
        return make_engine(path)
    except ConfigError as error:
        if error.reason != "MAX_MODEL_LEN":
            raise
        return make_engine(path, max_model_len=_MAX_MODEL_LEN)


def expected_of(family: Family) -> Mapping[str, Generated]:
    """Greedy tokens of all prompts. Raises NoTrialError if `generate` fails or a comparison would not count."""
    try:
        expected = {name: family.greedy(prompt, NUM_TOKENS + SPARE) for name, prompt in prompts_of(1).items()}
    except Exception as error:
        raise NoTrialError(f"generate fails: {_line(error)}") from error
    if not all(math.isfinite(logprob) for made in expected.values() for logprob in made.logprobs):
        raise NoTrialError("the tiny model's logits are not finite")
    if not is_diverse(expected):
        raise RepeatsError
    return expected


def reach_of(model: PreTrainedModel) -> int:
    """Distance of the farthest token, of some, that the logits behind a prompt depend on."""
    rng = random.Random(0)
    prompt = [rng.randrange(256) for _ in range(_LAST_TOKENS)]
    plain = _last_logits(model, prompt)
    for distance in sorted(_DISTANCES, reverse=True):
        changed = list(prompt)
        changed[-1 - distance] = (changed[-1 - distance] + 7) % 256
        if (_last_logits(model, changed) - plain).abs().max() > _SEEN * plain.abs().max():
            return distance
    return 0


def _last_logits(model: PreTrainedModel, prompt: list[int]) -> torch.Tensor:
    ids = torch.tensor([prompt])
    given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 1, "do_sample": False, "pad_token_id": 0}
    made = model.generate(ids, **given, output_logits=True, return_dict_in_generate=True)
    return made.logits[0][0].float()


def _reason(error: ConfigError) -> str:
    """The refusal's first sentence, without what is supported instead."""
    return _line(error).partition(". Supported are")[0]


def _line(error: Exception) -> str:
    """Kind and first words of an error, in one line without folders that differ from run to run."""
    words = re.sub(r"/tmp/\S*?/", "", " ".join(str(error).split()))
    return words[:300] if isinstance(error, ConfigError) else f"{type(error).__name__}: {words[:200]}"
