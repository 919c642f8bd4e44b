"""Beams of every family through the whole engine in process: those of `generate(num_beams=4)`, in blocks that force preemption.

Some families here, all of them in `make test-long`; both sizes are printed.
"""

import itertools
from collections import Counter
from pathlib import Path

import pytest

from quire import LLM
from quire.client.outputs import RequestOutput
from quire.client.sampling_params import BeamSearchParams
from scheduler_svc.core.plan import StepPlan
from tests.support.checkpoints import (
    EOS_TOKEN_ID,
    FAMILIES,
    SAMPLE_FAMILIES,
    SAMPLE_STATE_FAMILIES,
    STATE_FAMILIES,
)
from tests.support.worker.driver import on_tests_device
from tests.support.worker.generated import BeamRule
from tests.worker.engine.families import Family, prompts_of

_SCORE_TOLERANCE = 1e-4
_NUM_TOKENS = 12
# Of families with many cache groups: few enough that searches are preempted.
_NUM_BLOCKS_OF_GROUPS = {"gemma4_text": 72, "mimo_v2_flash": 72}
# Of models with states: two searches would have more.
_NUM_STATES = 7
# Every eighth token ends a hypothesis, so that searches end in all the ways there are.
_ENDS = (*range(3, 500, 8), EOS_TOKEN_ID)
RULES = [
    BeamRule(length_penalty=penalty, early_stopping=early, ends=_ENDS, num_tokens=_NUM_TOKENS)
    for penalty, early in itertools.product((1.0, 0.0, 2.0), (False, True, "never"))
]
# Policy, its keys, and how it preempts.
POLICIES = [
    ("vllm-v0", {"preemption_mode": "swap"}, "swap"),
    ("quire", {"restraint": None, "preemption_mode": "recompute", "max_num_batched_tokens": 48}, "recompute"),
]
POLICIES_OF_STATES = [
    ("quire", {"restraint": None, "preemption_mode": "swap", "max_num_batched_tokens": 48}, "swap"),
    POLICIES[1],
]
Search = tuple[list[int], BeamRule]


def searches(names: tuple[str, ...]) -> list[Search]:
    """Three rules for each prompt in turn, so that three prompts have all of them."""
    prompts, rules = prompts_of(1), itertools.cycle(RULES)
    return [(prompts[name], next(rules)) for name in names for _ in range(3)]


def run_all(llm: LLM, wanted: list[Search]) -> list[RequestOutput]:
    """All at once."""
    for number, (prompt, rule) in enumerate(wanted):
        params = BeamSearchParams(
            beam_width=rule.width,
            max_tokens=rule.num_tokens,
            length_penalty=rule.length_penalty,
            early_stopping=rule.early_stopping,
            stop_token_ids=rule.ends,
        )
        llm.add_request(str(number), prompt, params.sampling_params())
    done = {}
    while llm.has_unfinished_requests():
        done |= {output.request_id: output for output in llm.step() if output.finished}
    return [done[str(number)] for number in range(len(wanted))]


def searched(path: Path, policy, wanted: list[Search], num_blocks: int, monkeypatch):
    """Outputs, and the plans by which they were made."""
    name, keys, _ = policy
    sizes = {"num_gpu_blocks_override": num_blocks, "swap_space": "4MiB", "max_model_len": 160, "max_num_seqs": 32}
    sizes |= {"cache_groups": name == "quire"}  # the other keeps one block table
    with LLM(path, dtype="float32", policy=name, policy_set=keys, **sizes, **on_tests_device({})) as llm:
        core, plans = llm._backend._core, []
        inner = core.schedule

        def schedule(now: float) -> list[StepPlan]:
            made = inner(now)
            plans.extend(made)
            return made

        monkeypatch.setattr(core, "schedule", schedule)
        return run_all(llm, wanted), plans


def check(output: RequestOutput, family: Family, search: Search) -> None:
    expected = family.beams(*search)
    assert output.error is None
    assert [choice.token_ids for choice in output.outputs] == [made.token_ids for made in expected], search
    assert [choice.score for choice in output.outputs] == pytest.approx(
        [made.score for made in expected], abs=_SCORE_TOLERANCE
    )


def compare(family: Family, policy, names: tuple[str, ...], num_blocks: int, monkeypatch) -> str:
    """All searches at once against those of generate; says how much there was."""
    wanted = searches(names)
    outputs, plans = searched(family.path, policy, wanted, num_blocks, monkeypatch)
    for output, search in zip(outputs, wanted, strict=True):
        check(output, family, search)
    lengths = {len(choice.token_ids) for output in outputs for choice in output.outputs}
    assert len(lengths) >= 4, "hypotheses were to end at many lengths"
    modes = Counter(mode for plan in plans for _, mode in plan.preempted)
    num_copies = sum(len(plan.copy) for plan in plans)
    assert set(modes) == {policy[2]} and num_copies > len(wanted), (modes, num_copies)
    return f"{family.name}, {policy[0]}, {len(wanted)} searches, {modes.total()} preemptions, {num_copies} copies"


@pytest.mark.parametrize("family", [*SAMPLE_FAMILIES, *SAMPLE_STATE_FAMILIES])
def test_beams_of_some_families(family, families, monkeypatch, record_property):
    """R21, R25, R94: beams, their order and scores equal those of `generate(num_beams=4)` for each `early_stopping` and three
    values of `length_penalty`, while blocks are copied on write and swapped."""
    num_states = _NUM_STATES * families[family].num_state_blocks
    policy = (POLICIES_OF_STATES if num_states else POLICIES)[0]
    size = compare(families[family], policy, ("p15", "p33"), 18 + num_states, monkeypatch)
    record_property("size", f"beams equal to generate: {size}")


@pytest.mark.long
@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy[0])
@pytest.mark.parametrize("family", FAMILIES)
def test_beams_of_every_family(family, policy, families, monkeypatch, record_property):
    """R21, R25, R94: beams, their order and scores equal those of `generate(num_beams=4)` for each `early_stopping` and three
    values of `length_penalty`, while blocks are copied on write, swapped and recomputed."""
    num_blocks = _NUM_BLOCKS_OF_GROUPS.get(family, 36) if policy[0] == "quire" else 36
    size = compare(families[family], policy, tuple(prompts_of(1)), num_blocks, monkeypatch)
    record_property("size", f"beams equal to generate: {size}")


@pytest.mark.long
@pytest.mark.parametrize("policy", POLICIES_OF_STATES, ids=lambda policy: policy[2])
@pytest.mark.parametrize("family", STATE_FAMILIES)
def test_beams_of_families_with_states(family, policy, families, monkeypatch, record_property):
    """R21, R25, R94: beams of models with states, their order and scores equal those of `generate(num_beams=4)` for each
    `early_stopping` and three values of `length_penalty`, while states are copied on write, swapped and recomputed."""
    num_blocks = 30 + _NUM_STATES * families[family].num_state_blocks
    size = compare(families[family], policy, tuple(prompts_of(1)), num_blocks, monkeypatch)
    record_property("size", f"beams equal to generate: {size}")


def test_a_lost_copy_is_seen(families, monkeypatch):
    """The tests above can fail: beams that write into each other's blocks are others."""
    monkeypatch.setattr("worker_svc.model.cache.cache_engine.CacheEngine.copy", lambda *_: None)
    family, wanted = families[SAMPLE_FAMILIES[0]], searches(("p33",))
    outputs, _ = searched(family.path, POLICIES[0], wanted, 64, monkeypatch)
    with pytest.raises(AssertionError):
        for output, search in zip(outputs, wanted, strict=True):
            check(output, family, search)
