"""What `transformers` itself makes of a checkpoint: greedy tokens, logprobs, beams and hidden states, without any of our code."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from tests.support.checkpoints import load_reference

LOGPROB_TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True)
class Generated:
    """Greedy continuation of one prompt: token ids and their log probabilities."""

    token_ids: list[int]
    logprobs: list[float]

    def check(self, token_ids: Sequence[int], logprobs: Sequence[float]) -> None:
        """Equal tokens, logprobs within the tolerance; of two continuations the shorter counts."""
        count = min(len(token_ids), len(self.token_ids))
        pairs = zip(token_ids[:count], self.token_ids[:count], strict=True)
        first = next((place for place, (made, wanted) in enumerate(pairs) if made != wanted), None)
        assert first is None, f"token {first} of {count} is not generate's"
        deviations = (abs(a - b) for a, b in zip(logprobs[:count], self.logprobs[:count], strict=True))
        worst = max(deviations, default=0.0)
        assert worst < LOGPROB_TOLERANCE, f"logprobs deviate by {worst:.2g}"


@dataclass(frozen=True, slots=True)
class BeamRule:
    """How a beam search ends and ranks, as `generate` names it. `ends`: ids of ending tokens."""

    length_penalty: float
    early_stopping: bool | str
    ends: tuple[int, ...]
    num_tokens: int
    width: int = 4


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """One of a search: tokens, the ending one included, and what it was ranked by."""

    token_ids: list[int]
    score: float


def reference_model(path: Path) -> PreTrainedModel:
    """The checkpoint as transformers runs it, in float32; its generation never stops by itself."""
    model = load_reference(path)
    model.generation_config.eos_token_id = None
    return model


def greedy(model: PreTrainedModel, prompt: Sequence[int], num_tokens: int) -> Generated:
    """`generate` for one prompt alone."""
    ids = torch.tensor([list(prompt)])
    made = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_tokens,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        pad_token_id=0,
    )
    tokens = made.sequences[0, len(prompt) :]
    logprobs = torch.stack(made.logits)[:, 0].log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    return Generated(tokens.tolist(), logprobs.tolist())


def other_answer(model: PreTrainedModel, prompt: Sequence[int], made: Generated) -> list[int]:
    """Where `model` contradicts itself: what was `made` until then, and the token that one pass over all of it gives instead.

    That happens where two experts are as good for a router: the last bits decide. AssertionError where it does not.
    """
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *made.token_ids]])).logits[0, len(prompt) - 1 : -1]
    again = logits.argmax(-1).tolist()
    assert again != made.token_ids, "the model does not contradict itself"
    place = next(place for place, token in enumerate(made.token_ids) if again[place] != token)
    return [*made.token_ids[:place], again[place]]


def beams(model: PreTrainedModel, prompt: Sequence[int], rule: BeamRule) -> list[Hypothesis]:
    """`generate(num_beams=width)` for one prompt alone: all hypotheses, best first."""
    ids = torch.tensor([list(prompt)])
    made = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        num_beams=rule.width,
        num_return_sequences=rule.width,
        max_new_tokens=rule.num_tokens,
        do_sample=False,
        length_penalty=rule.length_penalty,
        early_stopping=rule.early_stopping,
        eos_token_id=list(rule.ends),
        output_scores=True,
        return_dict_in_generate=True,
        pad_token_id=0,
    )
    rows = made.sequences[:, len(prompt) :].tolist()
    return [Hypothesis(_ended(row, rule.ends), s) for row, s in zip(rows, made.sequences_scores.tolist(), strict=True)]


def _ended(tokens: list[int], ends: Sequence[int]) -> list[int]:
    """Without the padding behind the first ending token."""
    return tokens[: next((i + 1 for i, token in enumerate(tokens) if token in ends), len(tokens))]


@torch.inference_mode()
def last_hidden(model: PreTrainedModel, prompt: Sequence[int]) -> torch.Tensor:
    """[tokens, hidden size]: the last hidden states, as AutoModel gives them."""
    decoder = model.model if model.base_model is model else model.base_model
    return decoder(torch.tensor([list(prompt)])).last_hidden_state[0]
