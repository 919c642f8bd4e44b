"""Every preset through the services: mixed requests in few blocks give the tokens of an undisturbed run, in the preset's own way.

A sample here (one preset, 15 requests; `test_policies` has all in one process), the whole in `make test-long` (all, 64 requests);
sizes are printed.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from quire.local_stack.stack import LocalStack
from scheduler_svc.core.composition.presets import policy_names
from tests.e2e import preset_signs as signs
from tests.e2e.preset_cases import Case, check, compare, serve_on
from tests.support.stack import mixed_requests

_COUNT, _SAMPLE_COUNT = 64, 15
_important_first = signs.important_first(mixed_requests.asks(_COUNT))


_V0 = (signs.never_mixes, signs.preempts, signs.has_in_flight(1))
_V1 = (signs.mixes, signs.never_swaps, signs.recomputes)
_BY_COST = ("restraint=null",)
_SWAP = ("preemption_mode=swap",)
_OVERLAP = ("--overlap",)
_FROM_THE_TOP = (signs.takes_blocks_from("g39"),)

TIGHT = Case("quire", (signs.mixes,), (*_BY_COST, *_SWAP, "num_spec_tokens=4"))
"""That of the fixture `tight`."""
WHOLE = [
    Case("quire", (signs.mixes, signs.has_in_flight(2), _important_first), args=_OVERLAP),
    Case("quire", (signs.mixes, signs.preempts, signs.has_in_flight(2)), _BY_COST, args=_OVERLAP),
    Case("quire", (signs.mixes, signs.swaps), (*_BY_COST, *_SWAP)),
    Case("vllm-v0", (*_V0, signs.leaves_by_number), ("policy=fcfs",), num_blocks=32),
    Case("vllm-v0", (*_V0, _important_first), ("policy=priority",)),
    Case("vllm-v0", (*_V0, signs.swaps, _important_first), _SWAP),
    Case("vllm-v0", (*_V0, signs.delays), ("delay_factor=20",)),
    Case("vllm-v0-chunked", (signs.mixes, signs.cuts, signs.preempts), ("max_num_batched_tokens=64",)),
    Case("vllm-2023", (*_V0, signs.swaps, *_FROM_THE_TOP), (*_SWAP, "prefix_caching=false")),
    Case("vllm-v1", (*_V1, signs.has_in_flight(1), _important_first)),
    Case("vllm-v1", (*_V1, signs.cuts), ("max_num_batched_tokens=64",)),
    Case("vllm-v1-async", (*_V1, signs.has_in_flight(2)), args=_OVERLAP),
    Case("static", (signs.no_request_joins, signs.waits_for_blocks), num_blocks=24),
    Case("chitu", (signs.never_mixes, signs.recomputes, signs.threshold_moves)),
    Case(
        "chitu-skew",
        (signs.stays, signs.has_places(8), signs.has_in_flight(2), signs.never_preempts, signs.waits_for_room),
        ("infer.pp_size=2", "infer.max_reqs=16"),
        args=_OVERLAP,
    ),
    Case(
        "chitu-dp",
        (signs.stays, signs.never_mixes, signs.never_preempts, signs.waits_for_room),
        stack={"workers": 2},
        num_blocks=32,
    ),
]


def test_a_preset_gives_undisturbed_tokens(
    tight: LocalStack, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """R21, R25: one preset; its recording is replayed to the last decision (R201)."""
    record_property("size", check(TIGHT, _SAMPLE_COUNT, serve_on(tight, _SAMPLE_COUNT, tmp_path)))


def test_no_preset_is_left_out() -> None:
    """Each new preset must state what its log shows."""
    assert {case.policy for case in WHOLE} == set(policy_names())


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", WHOLE, ids=str)
def test_every_preset_gives_undisturbed_tokens(
    case: Case, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """R21, R25, R27, R75, R76, R183, R190: every preset; their recordings are replayed to the last decision (R201)."""
    record_property("size", compare(case, _COUNT, tmp_path))
