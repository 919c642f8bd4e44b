"""Results of the simulated worker: tokens, candidates, logprobs, embeddings, right and wrong draft tokens.

All are functions of a hash of the row's tokens (plus seed and sequence index if it has a temperature).
Options that say what a row yields are honoured (children, candidates, drafts, min_tokens, logprobs, tasks);
those that shape a distribution are not, since there is none.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire_tools.simulated_worker import bundle as simulated_bundle
from quire_tools.simulated_worker.cache import SimulatedCache, mix
from worker_svc.rows.options import Rule
from worker_svc.rows.table import RowTable
from worker_svc.sampling.draw_plan import DrawPlan
from worker_svc.sampling.step_results import Tops

U64Array = NDArray[np.uint64]
IntArray = NDArray[np.int32]

_LETTERS = np.frombuffer(b"etaoin shrdlu cmfwyp", np.uint8).astype(np.int32)
_VECTOR_SIZE = 8
_ONE = np.uint64(1)
_WRONG_ONE_IN = np.uint64(4)


@dataclass(frozen=True, slots=True)
class SimulatedDraws:
    """Draws for the rows of `table`. `eos_probability`: chance of the end-of-text token at each draw."""

    table: RowTable
    eos_probability: float

    def words(self, plan: DrawPlan, contents: U64Array) -> U64Array:
        """[D]: a random word for each draw; `contents` [P], hashes of the tokens before each place."""
        at = plan.draw_places
        return self._words(plan.draw_rows, plan.sequence_indexes, plan.lengths[at], contents[at])

    def _words(self, rows: IntArray, indexes: IntArray, lengths: IntArray, contents: U64Array) -> U64Array:
        key = mix(self.table.seeds[rows] + mix(indexes.astype(np.uint64) + _ONE))
        key = np.where(self.table.temperatures[rows] > 0, key, np.uint64(0))
        return mix(contents ^ mix(key + lengths.astype(np.uint64)))

    def tokens(self, words: U64Array, rows: IntArray, lengths: IntArray) -> IntArray:
        """The token of each word. `lengths`: tokens before it in its row."""
        letters = _letters(words)
        if not self.eos_probability:
            return letters
        chance = (words >> np.uint64(11)).astype(np.float64) / 2**53
        ends = (chance < self.eos_probability) & ~self._too_early(rows, lengths)
        return np.where(ends, simulated_bundle.END_OF_TEXT, letters).astype(np.int32)

    def _too_early(self, rows: IntArray, lengths: IntArray) -> NDArray[np.bool_]:
        options = self.table.options
        short = lengths - self.table.num_prompt[rows] < options.min_tokens[rows]
        return short & (options.rules[rows] & Rule.MIN_TOKENS > 0)

    def tops(self, words: U64Array, tokens: IntArray, counts: IntArray) -> Tops:
        """The token of each word, then further letters up to `counts`, each a little less likely."""
        most = min(int(counts.max(initial=0)), len(_LETTERS))
        order = np.arange(most)
        ids = _letters(words[:, None] + order.astype(np.uint64))
        ids[:, :1] = tokens[:, None]
        values = logprobs(words)[:, None] - order.astype(np.float32)
        return Tops(np.minimum(counts, most).astype(np.int32), ids, values)

    # --- draft tokens ------------------------------------------------------------------------------------------------

    def guesses(self, cache: SimulatedCache, rows: IntArray, counts: IntArray) -> list[IntArray]:
        """Draft tokens of each row: those it will draw, except for some that the hash makes wrong."""
        known = self.table.num_known[rows]
        contents = np.array(
            [
                cache.content_of(self.table.token_ids[row, :num])
                for row, num in zip(rows.tolist(), known.tolist(), strict=True)
            ],
            np.uint64,
        )
        made = np.zeros((len(rows), int(counts.max())), np.int32)
        for i in range(made.shape[1]):
            words = self._words(rows, self.table.sequence_indexes[rows], known + i, contents)
            right = self.tokens(words, rows, known + i)
            made[:, i] = np.where((words >> np.uint64(50)) % _WRONG_ONE_IN > 0, right, _letters(words + _ONE))
            contents = cache.continued(contents, made[:, i], known + i)
        return [made[i, :count] for i, count in enumerate(counts.tolist())]


def _letters(words: U64Array) -> IntArray:
    return _LETTERS[(words % np.uint64(len(_LETTERS))).astype(np.int64)]


def logprobs(words: U64Array) -> NDArray[np.float32]:
    """Logprob of each word's token, in (-1, 0]."""
    values: NDArray[np.float32] = -((words >> np.uint64(40)) % np.uint64(1000)).astype(np.float32) / np.float32(1000)
    return values


def vector(content: np.uint64) -> NDArray[np.float32]:
    """The embedding of a row; elements in (-1, 1)."""
    words = mix(content + np.arange(_VECTOR_SIZE, dtype=np.uint64))
    return ((words >> np.uint64(40)).astype(np.float32) / np.float32(2**23) - 1).astype(np.float32)
