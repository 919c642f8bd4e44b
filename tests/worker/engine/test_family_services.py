"""Every family through scheduler and worker over gRPC, the next step planned and sent while one runs: tokens and logprobs of
`generate`, and the step log shows that what could disturb them happened. Some families here, all in `make test-long`.
"""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

import pytest

from protos.common.v1 import common_pb2
from protos.inference.v1 import admin_pb2
from scheduler_svc.workers.lane import WorkerLane
from tests.support.checkpoints import (
    EOS_TOKEN_ID,
    FAMILIES,
    SAMPLE_FAMILIES,
    SAMPLE_STATE_FAMILIES,
    STATE_FAMILIES,
)
from tests.support.services.harness import Output, Stack, run_async, stack
from tests.support.worker import generated
from tests.support.worker.driver import BLOCK_SIZE, new_engine
from tests.support.worker.generated import BeamRule
from tests.worker.engine.families import Family, prompts_of
from worker_svc.executor.model_engine import ModelEngine

_LONG, _SHORT = 100, 50
_NUM_BLOCKS, _NUM_BLOCKS_OF_GROUPS = 26, 52
_OF_MANY_GROUPS = {"gemma4_text": 140, "mimo_v2_flash": 104}
# So many sequences of models with states have theirs beside those blocks: two choices, or beams and what they copy.
_NUM_STATES = 6
_LENGTHS = (8, 17, 30)
# What happens depends on when results come, and machines that run tests are busy.
_ROUNDS = 5
_BEAMS = BeamRule(length_penalty=1.0, early_stopping=False, ends=(EOS_TOKEN_ID,), num_tokens=8)


@dataclass(frozen=True, slots=True)
class Serving:
    """A policy with its keys, and what its steps are to show. `cache_groups`: False for a policy that keeps one block table."""

    name: str
    policy: str
    keys: tuple[str, ...]
    shows: frozenset[str]
    cache_groups: bool = True


_MIXED = {"chunk", "long neighbour", "overlap", "prefix hit", "copy on write"}
_CHUNKS = ("restraint=null", "max_num_batched_tokens=64")
SERVINGS = [
    Serving("swap", "quire", ("preemption_mode=swap", *_CHUNKS), frozenset({"swap", *_MIXED})),
    Serving("recompute", "quire", ("preemption_mode=recompute", *_CHUNKS), frozenset({"recompute", *_MIXED})),
    Serving(
        "multi-step",
        "vllm-v0",
        ("num_scheduler_steps=4",),
        frozenset({"multi-step", "swap", "recompute", "copy on write"}),
        cache_groups=False,
    ),
]
SERVINGS_OF_STATES = [
    *SERVINGS[:2],
    Serving("v1 async", "vllm-v1-async", ("max_num_batched_tokens=64",), frozenset({"recompute", *_MIXED})),
]


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: greedy in one choice or several equal ones, or beams."""

    prompt: list[int]
    num_tokens: int
    num_choices: int = 1
    beams: bool = False

    def submission(self) -> dict[str, object]:
        """Arguments of `Gateway.submit`."""
        values: dict[str, object] = {"max_tokens": self.num_tokens, "num_choices": self.num_choices}
        if self.beams:
            rules = common_pb2.BeamRules(length_penalty=1.0, stop=common_pb2.BEAM_STOP_WHEN_UNBEATABLE)
            return values | {"best_of": self.num_choices, "beam": rules, "logprobs": True}
        return values | {"logprobs": True}

    def check(self, output: Output, family: Family) -> None:
        """What came is what `generate` gives."""
        assert output.failed is None
        if self.beams:
            expected = family.beams(self.prompt, _BEAMS)
            assert output.choices == [made.token_ids for made in expected]
            scores = [output.ends[choice].score for choice in range(self.num_choices)]
            assert scores == pytest.approx([made.score for made in expected], abs=1e-4)
            return
        made = family.greedy(self.prompt, self.num_tokens)
        assert len(output.choices) == self.num_choices
        num_right = len(made.token_ids)
        if others := [choice for choice in output.choices if choice != made.token_ids]:
            answer = generated.other_answer(family.reference, self.prompt, made)
            assert [choice[: len(answer)] for choice in others] == [answer] * len(others)
            num_right = len(answer) - 1
        made.check(output.tokens[:num_right], output.logprobs[:num_right])


def asks() -> list[Ask]:
    """Prompts of all lengths with outputs of several, some twice over, and beams."""
    prompts = list(prompts_of(1).values())
    found = [Ask(prompt, _LENGTHS[i % 3], num_choices=1 + i % 2) for i, prompt in enumerate(prompts)]
    found += [Ask(prompt, _LENGTHS[(i + 1) % 3]) for i, prompt in enumerate(prompts)]
    return [*found, *(Ask(prompt, _BEAMS.num_tokens, _BEAMS.width, beams=True) for prompt in prompts[2:4])]


def watch_overlap(monkeypatch) -> list[int]:
    """How many plans were in flight each time one had been sent, that one included."""
    counts, inner = [], WorkerLane.send

    async def send(lane: WorkerLane, *args) -> None:
        await inner(lane, *args)
        counts.append(len(lane.in_flight))

    monkeypatch.setattr(WorkerLane, "send", send)
    return counts


def events_of(steps: Iterable[admin_pb2.StepReport]) -> set[str]:
    """What steps did, by the names of `shows`."""
    steps, found = list(steps), set()
    moves = {"swap": ("swap_out", "swap_in"), "copy on write": ("copy",)}
    found |= {name for name, fields in moves.items() if all(any(getattr(s, f) for s in steps) for f in fields)}
    found |= {entry.mode for step in steps for entry in step.preempted} - {"swap"}
    found |= {"multi-step"} if any(len(run.tokens) > 1 for step in steps for run in step.sampled) else set()
    found |= {"long neighbour"} if any(_has_long_neighbour(step) for step in steps) else set()
    return found | ({"chunk"} if _has_chunks(steps) else set())


def _has_long_neighbour(step: admin_pb2.StepReport) -> bool:
    ends = [group.computed_before + group.tokens for group in step.scheduled if len(group.seqs) == 1]
    return max(ends, default=0) > _LONG and min(ends) < _SHORT


def _has_chunks(steps: Iterable[admin_pb2.StepReport]) -> bool:
    """A prefill goes on where the step before it ended."""
    ends: dict[str, int] = {}
    for step in steps:
        for group in (group for group in step.scheduled if group.prefill):
            if ends.get(group.id) == group.computed_before > 0:
                return True
            ends[group.id] = group.computed_before + group.tokens
    return False


async def run_all(s: Stack, wanted: list[Ask]) -> list[Output]:
    """All at once."""
    handles = [await s.gateway.submit(ask.prompt, **ask.submission()) for ask in wanted]
    return list(await asyncio.gather(*(s.gateway.end_of(handle) for handle in handles)))


def poisoned(engine: ModelEngine) -> ModelEngine:
    """The same with NaN in blocks that nothing was written to."""
    inner = engine.allocate

    def allocate(num_gpu_blocks: int, num_cpu_blocks: int) -> None:
        inner(num_gpu_blocks, num_cpu_blocks)
        engine.cache.device_pool.fill_(float("nan"))

    engine.allocate = allocate
    return engine


def num_blocks(family: Family, serving: Serving) -> int:
    """Few enough that sequences are preempted."""
    if family.num_state_blocks:
        return _NUM_BLOCKS + _NUM_STATES * family.num_state_blocks
    layer_types = getattr(family.reference.config.get_text_config(), "layer_types", None) or ()
    has_groups = serving.cache_groups and len(set(layer_types)) > 1
    return _OF_MANY_GROUPS.get(family.name, _NUM_BLOCKS_OF_GROUPS) if has_groups else _NUM_BLOCKS


async def compare(family: Family, serving: Serving, monkeypatch) -> str:
    """All requests at once against generate, again until all has happened that is to happen; says how much there was."""
    in_flight = watch_overlap(monkeypatch)
    for _ in range(_ROUNDS):
        size, events = await compare_once(family, serving, in_flight)
        if events >= serving.shows:
            return size
    raise AssertionError(f"missing: {serving.shows - events}")


async def compare_once(family: Family, serving: Serving, in_flight: list[int]) -> tuple[str, set[str]]:
    """How much there was, and what happened."""
    wanted, num_before = asks(), len(in_flight)
    settings = {
        "num_blocks": num_blocks(family, serving),
        "max_model_len": 256,
        "cache_groups": serving.cache_groups,
        "checkpoint_tokens": 2 * BLOCK_SIZE if family.num_state_blocks else 0,
    }
    async with stack(
        make_engine=lambda _: poisoned(new_engine(family.path, **settings)),
        policy=serving.policy,
        policy_set=serving.keys,
        max_num_seqs=16,
        overlap=True,
    ) as s:
        outputs = await run_all(s, wanted)
        if family.num_state_blocks:  # among so many, checkpoints are overwritten before a request could hit them
            wanted += [max(wanted, key=lambda ask: len(ask.prompt) * (ask.num_choices == 1))] * 2
            outputs += [(await run_all(s, [ask]))[0] for ask in wanted[-2:]]
        steps = await s.admin.steps()
        await s.admin.assert_all_free()
    for ask, output in zip(wanted, outputs, strict=True):
        ask.check(output, family)
    assert not any(step.error for step in steps)
    events = events_of(steps)
    events |= {"prefix hit"} if any(output.started.cached_prompt_tokens for output in outputs) else set()
    sent = in_flight[num_before:]
    num_overlapped = sum(count > 1 for count in sent)
    events |= {"overlap"} if num_overlapped > len(sent) // 2 else set()
    size = f"{family.name}, {serving.name}, {len(wanted)} requests, {len(steps)} steps, {num_overlapped} overlapped"
    return size, events


@pytest.mark.parametrize("family", [*SAMPLE_FAMILIES, *SAMPLE_STATE_FAMILIES])
@run_async
async def test_some_families_with_overlap(family, families, monkeypatch, record_property):
    """Through scheduler and worker with overlap, tokens and beams equal those of `generate`, with chunks, swap, prefix hits, copy
    on write and batches of long and short sequences."""
    size = await compare(families[family], SERVINGS[0], monkeypatch)
    record_property("size", f"equal to generate through the services: {size}")


@pytest.mark.long
@pytest.mark.parametrize("serving", SERVINGS, ids=lambda serving: serving.name)
@pytest.mark.parametrize("family", FAMILIES)
@run_async
async def test_every_family_with_overlap(family, serving, families, monkeypatch, record_property):
    """Through scheduler and worker with overlap, tokens and beams equal those of `generate`, with chunks, swap, recompute, prefix
    hits, copy on write, multi-step decode and batches of long and short sequences."""
    size = await compare(families[family], serving, monkeypatch)
    record_property("size", f"equal to generate through the services: {size}")


@pytest.mark.long
@pytest.mark.parametrize("serving", SERVINGS_OF_STATES, ids=lambda serving: serving.name)
@pytest.mark.parametrize("family", STATE_FAMILIES)
@run_async
async def test_every_family_with_states_with_overlap(family, serving, families, monkeypatch, record_property):
    """Through scheduler and worker with overlap, tokens and beams of models with states equal those of `generate`, with chunks,
    swap, recompute, hits at checkpoints, copies of states and batches of long and short sequences."""
    size = await compare(families[family], serving, monkeypatch)
    record_property("size", f"equal to generate through the services: {size}")
