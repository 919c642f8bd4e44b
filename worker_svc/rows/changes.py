"""Parses a step's deltas: `SchedulerOutputs` to arrays, with every check that needs no row state.

`checks.py` has the other checks. Every error is InvalidArgument and names the field as worker.proto does.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protos.common.v1 import common_pb2
from protos.worker.v1 import worker_pb2
from svc_common import wire_arrays
from svc_common.errors import InvalidArgument
from worker_svc.rows.options import OptionColumns, read_options
from worker_svc.rows.states import NO_STATES, StateChanges, read_states

IntArray = NDArray[np.int32]

_NO_ROWS = np.zeros(0, np.int32)
_NO_PAIRS = np.zeros((0, 2), np.int32)

MOST_ROWS, MOST_STEP_TOKENS = 65_536, 2**24
"""Bounds on the sequences and tokens of a step, for any model."""


@dataclass(frozen=True, slots=True)
class ChangeLimits:
    """Bounds on the values in a step. `max_rows` bounds row indexes, `max_decode_steps` the multi-step count.

    `num_groups`: cache groups; a place in a block table has a block id for each. `num_state_blocks`: blocks of a row's states.
    """

    vocab_size: int
    max_model_len: int
    block_size: int
    num_gpu_blocks: int
    num_cpu_blocks: int
    max_rows: int = MOST_ROWS
    max_decode_steps: int = 64
    num_groups: int = 1
    num_state_blocks: int = 0


@dataclass(frozen=True, slots=True)
class Additions:
    """`AddedRows`, checked: arrays of length n; token ids and block ids as one array per row.

    `num_blocks` counts places in block tables; each has one of `block_ids` for each cache group, in order. The blocks of a row's
    states are the first of `block_ids`.
    """

    rows: IntArray
    incarnations: IntArray
    num_known: IntArray
    token_ids: list[IntArray]
    num_prompt: IntArray
    num_computed: IntArray
    num_tokens: IntArray
    num_blocks: IntArray
    block_ids: list[IntArray]
    temperatures: NDArray[np.float32]
    top_ps: NDArray[np.float32]
    top_ks: IntArray
    seeds: NDArray[np.uint64]
    sequence_indexes: IntArray
    logprobs: NDArray[np.bool_]
    names: Sequence[str]
    traces: Sequence[common_pb2.TraceContext]
    options: OptionColumns


@dataclass(frozen=True, slots=True)
class Changes:
    """`ChangedRows`, checked: arrays of length n; block ids and new tokens concatenated. `num_new_blocks` as in Additions."""

    rows: IntArray
    incarnations: IntArray
    num_tokens: IntArray
    num_new_blocks: IntArray
    new_block_ids: IntArray
    num_new_tokens: IntArray
    new_token_ids: IntArray
    num_drafts: IntArray


@dataclass(frozen=True, slots=True)
class StepChanges:
    """The changes of one step, checked as far as possible without row state. None or empty means no such change.

    `is_unchanged`: True if no row is mentioned, so every decoding row computes one more token.
    """

    num_decode_steps: int
    is_unchanged: bool
    removed: IntArray
    added: Additions | None
    changed: Changes | None
    swap_in: IntArray
    swap_out: IntArray
    copies: IntArray
    placed: Sequence[worker_pb2.PlacedImage] = ()
    states: StateChanges = NO_STATES

    @property
    def num_rows(self) -> int:
        """One past the largest added row index."""
        return 0 if self.added is None else int(self.added.rows.max()) + 1

    @property
    def is_empty(self) -> bool:
        """True if no row is mentioned, no block is moved and no states are read or kept."""
        moves = len(self.swap_in) or len(self.swap_out) or len(self.copies) or self.placed
        return self.is_unchanged and not moves and self.states is NO_STATES

    @property
    def num_blocks(self) -> int:
        """One past the largest block id assigned to rows; 0 if none is assigned."""
        joining = [] if self.added is None else self.added.block_ids
        growing = [] if self.changed is None else [self.changed.new_block_ids]
        most = int(np.maximum.reduce(np.concatenate([*joining, *growing, _NO_ROWS]), initial=-1)) + 1
        return max(most, self.states.num_blocks)

    def further(self) -> "StepChanges":
        """The changes of a further decode step, which are none."""
        return NO_CHANGES


NO_CHANGES = StepChanges(1, True, _NO_ROWS, None, None, _NO_PAIRS, _NO_PAIRS, _NO_PAIRS)
"""Those of a decode step of which no row is mentioned."""


def is_repetition(outputs: worker_pb2.SchedulerOutputs) -> bool:
    """True if the step is one decode step that mentions no row, moves no block and keeps no states."""
    return not (
        outputs.HasField("changed")
        or outputs.HasField("added")
        or outputs.removed_rows
        or outputs.num_decode_steps != 1
        or outputs.blocks_to_swap_in
        or outputs.blocks_to_swap_out
        or outputs.blocks_to_copy
        or outputs.placed
        or outputs.HasField("states_to_read")
        or outputs.HasField("states_to_keep")
    )


def read_step(outputs: worker_pb2.SchedulerOutputs, limits: ChangeLimits) -> StepChanges:
    """Parse and check the step's changes. Raises InvalidArgument naming the wrong field."""
    if not 1 <= outputs.num_decode_steps <= limits.max_decode_steps:
        raise InvalidArgument.field(
            "num_decode_steps", f"is {outputs.num_decode_steps}, must be 1 to {limits.max_decode_steps}"
        )
    gpu, cpu = limits.num_gpu_blocks, limits.num_cpu_blocks
    added = _read_added(outputs.added, limits) if outputs.HasField("added") else None
    changed = _read_changed(outputs.changed, limits) if outputs.HasField("changed") else None
    if added is not None and changed is not None:
        _check_once(added.rows, changed.rows)
    return StepChanges(
        num_decode_steps=outputs.num_decode_steps,
        is_unchanged=added is None and changed is None and not outputs.removed_rows,
        removed=_rows(outputs.removed_rows, "removed_rows", limits.max_rows) if outputs.removed_rows else _NO_ROWS,
        added=added,
        changed=changed,
        swap_in=_pairs(outputs, "blocks_to_swap_in", (cpu, gpu)) if outputs.blocks_to_swap_in else _NO_PAIRS,
        swap_out=_pairs(outputs, "blocks_to_swap_out", (gpu, cpu)) if outputs.blocks_to_swap_out else _NO_PAIRS,
        copies=_pairs(outputs, "blocks_to_copy", (gpu, gpu)) if outputs.blocks_to_copy else _NO_PAIRS,
        placed=outputs.placed,
        states=read_states(outputs, limits.num_state_blocks, gpu),
    )


def _check_once(added: IntArray, changed: IntArray) -> None:
    both = np.intersect1d(added, changed)
    if len(both):
        raise InvalidArgument.field(
            "changed.rows", f"row {int(both[0])} is added in the same step; mention it only in added"
        )


def _rows(data: bytes, field: str, max_rows: int) -> IntArray:
    rows = wire_arrays.unpack(data, field, minimum=0)
    if not len(rows):
        return rows
    last = int(np.maximum.reduce(rows))
    if last >= max_rows:
        raise InvalidArgument.field(field, f"has row {last}; rows are below {max_rows}")
    seen = np.zeros(last + 1, np.bool_)
    seen[rows] = True
    if np.count_nonzero(seen) != len(rows):
        raise InvalidArgument.field(field, "has the same row twice")
    return rows


def _pairs(outputs: worker_pb2.SchedulerOutputs, field: str, sizes: tuple[int, int]) -> IntArray:
    flat = wire_arrays.unpack(getattr(outputs, field), field, minimum=0)
    if len(flat) % 2:
        raise InvalidArgument.field(field, f"has {len(flat)} elements, which is not an even number")
    pairs = flat.reshape(-1, 2)
    for side, size in enumerate(sizes):
        _below(pairs[:, side], size, field, "block")
    return pairs


def _below(values: IntArray, bound: int, field: str, what: str) -> None:
    if len(values) and (most := int(np.maximum.reduce(values))) >= bound:
        raise InvalidArgument.field(field, f"has {what} {most}; must be below {bound}")


def _blame_first(bad: NDArray[np.bool_], rows: IntArray, field: str, what: str) -> None:
    if np.logical_or.reduce(bad):
        raise InvalidArgument.field(field, f"row {int(rows[bad][0])}: {what}")


def _run(data: bytes, counts: IntArray, field: str, bound: int, what: str) -> list[IntArray]:
    flat = wire_arrays.unpack(data, field, minimum=0)
    _below(flat, bound, field, what)
    # 64 bits: a sum of hostile int32 counts must not wrap.
    return wire_arrays.split(flat, counts.astype(np.int64), field)


def _read_added(message: worker_pb2.AddedRows, limits: ChangeLimits) -> Additions | None:
    rows = _rows(message.rows, "added.rows", limits.max_rows)
    n = len(rows)

    def column(name: str, dtype: np.dtype = wire_arrays.I32, minimum: int | None = 0) -> NDArray[Any]:
        return wire_arrays.unpack(getattr(message, name), f"added.{name}", dtype, length=n, minimum=minimum)

    num_known, num_ids = column("num_known_tokens", minimum=1), column("num_blocks")
    added = Additions(
        rows=rows,
        incarnations=column("incarnations"),
        num_known=num_known,
        token_ids=_run(message.token_ids, num_known, "added.token_ids", limits.vocab_size, "token"),
        num_prompt=column("num_prompt_tokens", minimum=1),
        num_computed=column("num_computed_tokens"),
        num_tokens=column("num_tokens"),
        num_blocks=_places(num_ids, rows, "added.num_blocks", limits, limits.num_state_blocks),
        block_ids=_run(message.block_ids, num_ids, "added.block_ids", limits.num_gpu_blocks, "block"),
        temperatures=column("temperatures", wire_arrays.F32, None),
        top_ps=column("top_ps", wire_arrays.F32, None),
        top_ks=column("top_ks"),
        seeds=column("seeds", wire_arrays.U64, None),
        sequence_indexes=column("sequence_indexes"),
        logprobs=column("logprobs", wire_arrays.U8, None).astype(np.bool_),
        names=message.names,
        traces=message.traces,
        options=read_options(message.options, rows, limits.vocab_size),
    )
    _check_counts(added, limits)
    _check_sampling(added)
    _check_names(added)
    return added if n else None


def _check_counts(added: Additions, limits: ChangeLimits) -> None:
    rows, known = added.rows, added.num_known
    _blame_first(
        known > limits.max_model_len,
        rows,
        "added.num_known_tokens",
        f"exceeds the model's limit of {limits.max_model_len}",
    )
    _blame_first(added.num_prompt > known, rows, "added.num_prompt_tokens", "more than its known tokens")
    _blame_first(
        added.num_computed >= known,
        rows,
        "added.num_computed_tokens",
        "not below its known tokens: none is left to compute",
    )
    left = known - added.num_computed
    _blame_first(added.num_tokens > left, rows, "added.num_tokens", "more than the known tokens left to compute")
    # Compared by division: the peer chooses the block counts, which may be large.
    held = -(-added.num_computed // limits.block_size)
    _blame_first(added.num_blocks < held, rows, "added.num_blocks", "too few for its computed tokens")
    _blame_first(added.num_blocks > limits.num_gpu_blocks, rows, "added.num_blocks", "more blocks than exist")


def _check_sampling(added: Additions) -> None:
    rows, heat, top_p = added.rows, added.temperatures, added.top_ps
    _blame_first(~(np.isfinite(heat) & (heat >= 0)), rows, "added.temperatures", "must be finite and not negative")
    _blame_first(~((top_p > 0) & (top_p <= 1)), rows, "added.top_ps", "must be in (0, 1]")


def _check_names(added: Additions) -> None:
    n = len(added.rows)
    if len(added.names) != n:
        raise InvalidArgument.field("added.names", f"has {len(added.names)} elements; must have {n}")
    if len(added.traces) not in {0, n}:
        raise InvalidArgument.field("added.traces", f"has {len(added.traces)} elements; must have none or {n}")


def _read_changed(message: worker_pb2.ChangedRows, limits: ChangeLimits) -> Changes | None:
    rows = _rows(message.rows, "changed.rows", limits.max_rows)
    n = len(rows)

    def column(name: str, *, may_be_empty: bool = False) -> IntArray:
        data = getattr(message, name)
        if may_be_empty and not data:
            return np.zeros(n, np.int32)
        return wire_arrays.unpack(data, f"changed.{name}", length=n, minimum=0)

    num_ids = column("num_new_blocks")
    new_block_ids = wire_arrays.unpack(message.new_block_ids, "changed.new_block_ids", minimum=0)
    _check_total(num_ids, new_block_ids, "changed.new_block_ids")
    changes = Changes(
        rows=rows,
        incarnations=column("incarnations"),
        num_tokens=column("num_tokens"),
        num_new_blocks=_places(num_ids, rows, "changed.num_new_blocks", limits),
        new_block_ids=new_block_ids,
        num_new_tokens=column("num_new_tokens", may_be_empty=True),
        new_token_ids=wire_arrays.unpack(message.new_token_ids, "changed.new_token_ids", minimum=0),
        num_drafts=column("num_draft_tokens", may_be_empty=True),
    )
    _check_changes(changes, limits)
    return changes if n else None


def _check_changes(changes: Changes, limits: ChangeLimits) -> None:
    rows = changes.rows
    _below(changes.new_block_ids, limits.num_gpu_blocks, "changed.new_block_ids", "block")
    many = changes.num_new_blocks > limits.num_gpu_blocks
    _blame_first(many, rows, "changed.num_new_blocks", "more blocks than exist")
    _below(changes.new_token_ids, limits.vocab_size, "changed.new_token_ids", "token")
    _check_total(changes.num_new_tokens, changes.new_token_ids, "changed.new_token_ids")
    guessed = changes.num_drafts > changes.num_tokens
    _blame_first(guessed, rows, "changed.num_draft_tokens", "more than the tokens to compute")


def _places(num_ids: IntArray, rows: IntArray, field: str, limits: ChangeLimits, num_state_blocks: int = 0) -> IntArray:
    """Places in block tables that so many ids fill, less those of states; num_ids [n]."""
    if num_state_blocks:
        lacking = f"fewer than the {num_state_blocks} blocks of the row's states"
        _blame_first(num_ids < num_state_blocks, rows, field, lacking)
        num_ids = num_ids - num_state_blocks
    if limits.num_groups == 1:
        return num_ids
    several = f"not a multiple of the model's {limits.num_groups} cache groups"
    _blame_first(num_ids % limits.num_groups != 0, rows, field, several)
    return num_ids // limits.num_groups


def _check_total(counts: IntArray, flat: IntArray, field: str) -> None:
    total = int(np.add.reduce(counts, dtype=np.int64))
    if total != len(flat):
        raise InvalidArgument.field(field, f"has {len(flat)} elements; the counts add up to {total}")
