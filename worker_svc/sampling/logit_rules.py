"""Rules applied to logits before sampling, in order: grammar, allowed tokens, bad words, min_tokens; bias; penalties.

A rule depends only on the row's tokens before the place, so results are the same with and without draft
tokens. Each rule is applied to all its rows at once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from worker_svc.rows.columns import RowColumns, runs_after
from worker_svc.rows.options import IntArray, LongArray, RowExtras, Rule
from worker_svc.sampling.token_masks import Bits

_CLOSED = float("-inf")


@dataclass(frozen=True, slots=True)
class RuledPlaces:
    """Places under some rule.

    `at` [m]: lines of the logits. `rows` [m]: row indexes. `lengths` [m]: tokens before each.

    `masks` [g, words]: of the places under a grammar, in order.
    """

    table: RowColumns
    at: LongArray
    rows: IntArray
    lengths: IntArray
    masks: Bits

    @property
    def rules(self) -> IntArray:
        """[m]: Rule bits."""
        return self.table.options.rules[self.rows]

    def under(self, rule: Rule) -> LongArray:
        """Indices of the places under a rule."""
        return np.flatnonzero(self.rules & rule)

    def extras(self, chosen: LongArray) -> list[RowExtras]:
        """Token lists of the chosen places' rows."""
        found = [self.table.options.extras[row] for row in self.rows[chosen].tolist()]
        return [extras for extras in found if extras is not None]

    def outputs(self, chosen: LongArray) -> IntArray:
        """Number of generated tokens before each chosen place."""
        return self.lengths[chosen] - self.table.num_prompt[self.rows[chosen]]


def apply_rules(logits: torch.Tensor, places: RuledPlaces) -> torch.Tensor:
    """float32 `logits` [P, vocab] with those of `places` changed, as a new tensor. -inf = never drawn."""
    at = _on(places.at, logits)
    changed = logits[at]
    for rule, method in _METHODS:
        chosen = places.under(rule)
        if len(chosen):
            method(changed, places, chosen)
    result = logits.clone()
    result[at] = changed
    return result


def _mask(logits: torch.Tensor, places: RuledPlaces, chosen: LongArray) -> None:
    bits = np.ascontiguousarray(places.masks).view(np.uint8)
    opens = np.unpackbits(bits, axis=1, bitorder="little", count=logits.shape[1]).view(np.bool_)
    at = _on(chosen, logits)
    logits[at] = logits[at].masked_fill(~_on(opens, logits), _CLOSED)


def _allow(logits: torch.Tensor, places: RuledPlaces, chosen: LongArray) -> None:
    entries, ids = _flat([extras.allowed_ids for extras in places.extras(chosen)])
    closed = torch.ones(len(chosen), logits.shape[1], dtype=torch.bool, device=logits.device)
    closed[_on(entries, logits), _on(ids, logits)] = False
    at = _on(chosen, logits)
    logits[at] = logits[at].masked_fill(closed, _CLOSED)


def _ban_words(logits: torch.Tensor, places: RuledPlaces, chosen: LongArray) -> None:
    """Ban a sequence's last token where the output ends with the tokens before it."""
    words = [extras.bad_words for extras in places.extras(chosen)]
    entries, lasts = _flat([word.lasts for word in words])
    sizes = np.concatenate([word.sizes for word in words])
    before = np.concatenate([word.before for word in words])
    fits = _ends_with(places, chosen[entries], sizes, before)
    logits[_on(chosen[entries][fits], logits), _on(lasts[fits], logits)] = _CLOSED


def _ends_with(places: RuledPlaces, of: LongArray, sizes: LongArray, before: LongArray) -> NDArray[np.bool_]:
    """[w]: True if the output before place `of[i]` ends with the i-th run of `before`, of `sizes[i]` tokens."""
    words, at = runs_after(np.arange(len(of)), places.lengths[of] - sizes, sizes)
    table, rows = places.table, places.rows[of]
    seen = table.token_ids[rows[words], np.maximum(at, 0)]
    differs = (seen != before) | (at < table.num_prompt[rows][words])
    return np.bincount(words[differs], minlength=len(of)) == 0


def _ban_ends(logits: torch.Tensor, places: RuledPlaces, chosen: LongArray) -> None:
    table = places.table
    chosen = chosen[places.outputs(chosen) < table.options.min_tokens[places.rows[chosen]]]
    if len(chosen):
        entries, ids = _flat([extras.min_tokens_ids for extras in places.extras(chosen)])
        logits[_on(chosen[entries], logits), _on(ids, logits)] = _CLOSED


def _add_biases(logits: torch.Tensor, places: RuledPlaces, chosen: LongArray) -> None:
    extras = places.extras(chosen)
    entries, ids = _flat([row.bias_ids for row in extras])
    biases = np.concatenate([row.biases for row in extras])
    logits[_on(chosen[entries], logits), _on(ids, logits)] += _on(biases, logits)


def _penalise(logits: torch.Tensor, places: RuledPlaces, chosen: LongArray) -> None:
    """Apply the repetition penalty to tokens of prompt and output; presence and frequency to tokens of the output."""
    options, rows, at = places.table.options, places.rows[chosen], _on(chosen, logits)
    found = logits[at]
    seen, output = _counts(places, chosen, found)
    repetition = _on(options.repetition_penalties[rows], logits)[:, None]
    found = torch.where(seen, torch.where(found > 0, found / repetition, found * repetition), found)
    found -= _on(options.frequency_penalties[rows], logits)[:, None] * output
    found -= _on(options.presence_penalties[rows], logits)[:, None] * (output > 0)
    logits[at] = found


def _counts(places: RuledPlaces, chosen: LongArray, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[c, vocab]: whether each token occurs before the chosen places (bool), and its count in the output (float32)."""
    table, rows, lengths = places.table, places.rows[chosen], places.lengths[chosen]
    entries, at = runs_after(np.arange(len(chosen)), np.zeros_like(lengths), lengths)
    ids = table.token_ids[rows[entries], at].astype(np.int64)
    flat = entries * like.shape[1] + ids
    in_output = _on(flat[at >= table.num_prompt[rows][entries]], like)
    output = torch.zeros_like(like)
    output.view(-1).index_add_(0, in_output, torch.ones(len(in_output), device=like.device))
    seen = output > 0
    seen.view(-1)[_on(flat, like)] = True
    return seen, output


def _flat(lists: Sequence[LongArray]) -> tuple[LongArray, LongArray]:
    """List index of each element, and the concatenated elements."""
    return np.repeat(np.arange(len(lists)), [len(one) for one in lists]), np.concatenate(lists)


def _on(array: NDArray[np.generic], like: torch.Tensor) -> torch.Tensor:
    # From unpinned memory: the array is read before the call returns, without waiting for the device.
    return torch.from_numpy(array).to(like.device, non_blocking=True)


_Method = Callable[[torch.Tensor, RuledPlaces, LongArray], None]
_METHODS: Sequence[tuple[Rule, _Method]] = (
    (Rule.GRAMMAR, _mask),
    (Rule.ALLOWED, _allow),
    (Rule.BAD_WORDS, _ban_words),
    (Rule.MIN_TOKENS, _ban_ends),
    (Rule.BIAS, _add_biases),
    (Rule.PENALTY, _penalise),
)
