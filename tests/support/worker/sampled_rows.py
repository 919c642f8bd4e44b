"""Rows with options for the tests of sampling, and what each option means, written plainly for one row at a time."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from protos.common.v1 import common_pb2
from protos.worker.v1 import worker_pb2
from svc_common import wire_arrays
from tests.support.worker.builders import Row, step
from worker_svc.rows.table import ChangeLimits, RowTable
from worker_svc.sampling.draw_plan import plan_draws
from worker_svc.sampling.row_sampler import Drawn, RowSampler
from worker_svc.sampling.token_masks import NO_WORK, Bits, MaskAsk, MaskWork, TokenMasks

VOCAB = 40
CLOSED = -math.inf
GRAMMAR = common_pb2.Grammar(kind=common_pb2.GRAMMAR_KIND_REGEX, text="toy")


@dataclass
class Options:
    """Of one row; everything off."""

    prompt: list[int] = field(default_factory=lambda: [1, 2, 3])
    output: list[int] = field(default_factory=list)
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    bias: dict[int, float] = field(default_factory=dict)
    allowed: list[int] = field(default_factory=list)
    bad_words: list[list[int]] = field(default_factory=list)
    min_tokens: int = 0
    ends: list[int] = field(default_factory=list)
    grammar: bool = False
    num_tops: int = 0
    num_children: int = 1
    num_candidates: int = 0
    seed: int = 0
    index: int = 0

    def message(self) -> worker_pb2.RowOptions:
        sampling = common_pb2.ResolvedSampling(
            min_p=self.min_p,
            repetition_penalty=self.repetition,
            presence_penalty=self.presence,
            frequency_penalty=self.frequency,
            logit_bias_ids=wire_arrays.pack(list(self.bias)),
            logit_biases=wire_arrays.pack(list(self.bias.values()), wire_arrays.F32),
            allowed_token_ids=wire_arrays.pack(self.allowed),
            bad_words=[common_pb2.TokenSequence(token_ids=wire_arrays.pack(word)) for word in self.bad_words],
            num_top_logprobs=self.num_tops,
            grammar=GRAMMAR if self.grammar else None,
        )
        return worker_pb2.RowOptions(
            sampling=sampling,
            min_tokens=self.min_tokens,
            min_tokens_ids=wire_arrays.pack(self.ends),
            num_children=self.num_children,
            num_candidates=self.num_candidates,
        )

    def row(self, index: int) -> Row:
        known = self.prompt + self.output
        return Row(
            index,
            known,
            range(64 * index, 64 * index + 64),
            len(known),
            num_prompt=len(self.prompt),
            temperature=self.temperature,
            seed=self.seed,
            index=self.index,
            logprobs=True,
            top_p=self.top_p,
            top_k=self.top_k,
            options=self.message(),
        )


class ToyMasks:
    """A grammar without an engine: after a token only those of its parity and every third may follow; the first is free.

    `refused`: rows whose grammar allows nothing.
    """

    def __init__(self, refused: Sequence[int] = ()) -> None:
        self.outputs: dict[int, list[int]] = {}
        self._refused = refused

    def add(self, row: int, grammar: common_pb2.Grammar, output_ids: Sequence[int]) -> None:
        assert grammar == GRAMMAR
        assert row not in self.outputs
        self.outputs[row] = list(output_ids)

    def remove(self, row: int) -> None:
        del self.outputs[row]

    def clear(self) -> None:
        self.outputs.clear()

    def accept(self, row: int, token_ids: Sequence[int]) -> None:
        for token in token_ids:
            assert toy_allows(self.outputs[row], token)
            self.outputs[row].append(token)

    def fill(self, asks: Sequence[MaskAsk], masks: Bits) -> MaskWork:
        for ask in asks:
            for j in range(len(ask.draft_ids) + 1):
                output = [*self.outputs[ask.row], *ask.draft_ids[:j]]
                bits = np.zeros(masks.shape[1] * 32, np.uint8)
                if ask.row not in self._refused:
                    bits[: 32 * masks.shape[1]] = [toy_allows(output, token) for token in range(32 * masks.shape[1])]
                masks[ask.at + j] = np.packbits(bits, bitorder="little").view(np.int32)
        return NO_WORK


def toy_allows(output: Sequence[int], token: int) -> bool:
    return not output or token % 3 == 0 or token % 2 == output[-1] % 2


def draw(rows: Sequence[Options], logits: torch.Tensor, masks: TokenMasks | None = None) -> Drawn:
    """One draw for each row at its line of `logits`."""
    table = RowTable(ChangeLimits(logits.shape[1], 200, 4, 64 * len(rows), 0))
    sampler = RowSampler(table, masks or ToyMasks())
    batch = table.apply(step(add=[options.row(i) for i, options in enumerate(rows)]))
    sampler.follow(batch.changes)
    return sampler.draw(plan_draws(table, batch), logits)


# --- the meaning of the options --------------------------------------------------------------------------------------


def shaped(logits: Sequence[float], o: Options) -> list[float]:
    """Masks, then bias, then penalties."""
    made = [x if open_to(token, o) else CLOSED for token, x in enumerate(logits)]
    for token, bias in o.bias.items():
        made[token] += bias
    for token in set(o.prompt + o.output):
        made[token] = made[token] / o.repetition if made[token] > 0 else made[token] * o.repetition
    for token in set(o.output):
        made[token] -= o.presence + o.frequency * o.output.count(token)
    return made


def open_to(token: int, o: Options) -> bool:
    if o.grammar and not toy_allows(o.output, token):
        return False
    if o.allowed and token not in o.allowed:
        return False
    if len(o.output) < o.min_tokens and token in o.ends:
        return False
    return not any(
        token == word[-1] and len(o.output) >= len(word) - 1 and o.output[len(o.output) - len(word) + 1 :] == word[:-1]
        for word in o.bad_words
    )


def distribution(logits: Sequence[float], o: Options) -> list[float]:
    """Of the token drawn: temperature, min-p, top-k, then top-p of what is left."""
    scaled = [x / o.temperature for x in shaped(logits, o)]
    top = max(scaled)
    weights = [math.exp(x - top) for x in scaled]
    order = sorted((i for i, w in enumerate(weights) if w > 0 and w >= o.min_p), key=lambda i: (-weights[i], i))
    kept = order[: o.top_k] if o.top_k else order
    total, mass, chosen = sum(weights[i] for i in kept), 0.0, set()
    for i in kept:
        if chosen and mass / total >= o.top_p:
            break
        chosen.add(i)
        mass += weights[i]
    return [weights[i] / mass if i in chosen else 0.0 for i in range(len(weights))]


def likelihood(counts: NDArray[np.int64], expected: NDArray[np.float64]) -> float:
    """Chance of counts at least as far from `expected` (chances, summing to 1) as these, by chi-square.

    Tokens too rare to be counted alone are counted together. AssertionError where something impossible was drawn.
    """
    draws = counts.sum()
    assert not counts[expected == 0].any()
    common, rare = expected * draws >= 5, (expected > 0) & (expected * draws < 5)
    seen = np.append(counts[common], counts[rare].sum())
    likely = np.append(expected[common], expected[rare].sum()) * draws
    seen, likely = seen[likely > 0], likely[likely > 0]
    assert len(seen) > 1, "the case must leave a choice"
    distance = float(((seen - likely) ** 2 / likely).sum())
    return float(torch.special.gammaincc(torch.tensor((len(seen) - 1) / 2.0), torch.tensor(distance / 2)))
