"""Draft tokens of rows with states: after a step a row has the states after exactly the tokens that were right."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from protos.common.v1 import common_pb2
from svc_common.errors import FailedPrecondition, InvalidArgument
from tests.support.worker.chaos import Chaos, origin
from tests.support.worker.driver import Driver, make_engine
from tests.support.worker.generated import Generated, greedy, reference_model
from tests.worker.engine.families import prompts_of
from tests.worker.families.tiny_checkpoints import state_checkpoint
from tests.worker.states.test_state_models import ON_THE_HOST
from worker_svc.executor.model_engine import ModelEngine
from worker_svc.invariance import RowRule
from worker_svc.model.states.possible_ends import PossibleEnds
from worker_svc.rows.batch import IntArray, StepBatch
from worker_svc.sampling.draft_proposer import DraftAsk

NUM_TOKENS, SPARE, MOST_DRAFTS = 14, 10, 4
WRONG = 300
"""No token of the prompts, and hardly one that a model generates."""


@dataclass(frozen=True, slots=True)
class World:
    """An engine, prompts, and what transformers makes of them."""

    engine: ModelEngine
    prompts: Mapping[str, list[int]]
    expected: Mapping[str, Generated]


@pytest.fixture(scope="module", params=["lfm2", "jamba", "nemotron_h", "qwen3_next"])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    """Short convolutions, Mamba, Mamba-2 and gated delta nets; the second and third compute tokens one by one."""
    path: Path = state_checkpoint(request.param, tmp_path_factory.mktemp("states") / "model")
    reference, prompts = reference_model(path), prompts_of(1)
    made = {name: greedy(reference, prompt, NUM_TOKENS + SPARE) for name, prompt in prompts.items()}
    return World(make_engine(path), prompts, made)


@dataclass
class KnowingProposer:
    """Proposes the tokens that the model will draw, of which the first `num_right(row)` are right."""

    sequences: Sequence[Sequence[int]]
    rng: random.Random
    follows: bool = False
    asked: list[tuple[int, int]] = field(default_factory=list)
    """(right, all) of each row with drafts."""

    def propose(self, asks: Sequence[DraftAsk]) -> list[IntArray]:
        """See Proposer."""
        return [self._drafts(ask) for ask in asks]

    def follow(self, batch: StepBatch) -> None:
        """See Proposer."""

    def _drafts(self, ask: DraftAsk) -> IntArray:
        known = ask.token_ids.tolist()
        whole = next(each for each in self.sequences if list(each[: len(known)]) == known)
        count = self.rng.choice((ask.num_tokens, ask.num_tokens, self.rng.randint(0, ask.num_tokens)))
        right = self.rng.randint(0, count)
        self.asked.append((right, count))
        follow = [*whole[len(known) : len(known) + right]]
        return np.array((follow + [WRONG] * count)[:count], np.int32)


def knowing(world: World, monkeypatch: pytest.MonkeyPatch, seed: int) -> KnowingProposer:
    """The engine's proposer from now on."""
    whole = [[*world.prompts[name], *made.token_ids] for name, made in world.expected.items()]
    proposer = KnowingProposer(whole, random.Random(seed))
    monkeypatch.setattr(world.engine._runner, "_proposer", proposer)
    return proposer


class DraftChaos(Chaos):
    """The same with draft tokens wherever a row computes its last known token."""

    def _advance(self) -> None:
        super()._advance()
        step = self.driver.step
        for i, (row, count, blocks) in enumerate(step.changed):
            if count and row.computed + count == len(row.token_ids) and self.rng.random() < 0.6:
                drafts = self.rng.randint(1, MOST_DRAFTS)
                more = self.driver._grow(row, len(row.token_ids) + self._room + drafts)
                step.changed[i], step.drafts[row.index] = (row, count + drafts, blocks + more), drafts


@pytest.mark.parametrize("seed", range(2))
def test_tokens_are_those_of_generate(
    world: World, seed: int, monkeypatch: pytest.MonkeyPatch, record_property
) -> None:
    """Through chunks, recompute, swap, hits at checkpoints, copies of states and multi-step decode, with NaN in blocks that
    were freed.
    """
    proposer = knowing(world, monkeypatch, seed)
    chaos = DraftChaos(world.engine, world.prompts, seed, num_tokens=NUM_TOKENS, poisoned=True)
    driver = chaos.run()
    for name, tokens in driver.tokens.items():
        made = world.expected[origin(name)]
        Generated(made.token_ids[: len(tokens)], made.logprobs[: len(tokens)]).check(tokens, driver.logprobs[name])
    accepted, asked = (sum(counts) for counts in zip(*proposer.asked, strict=True))
    assert accepted > 10 and asked - accepted > 10
    record_property("size", f"{accepted} of {asked} draft tokens accepted in {chaos.num_steps} steps")


def test_passes_that_cut_drafts(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several passes per step, whose ends are between a row's draft tokens: states are kept over all of them."""
    runner = world.engine._runner
    knowing(world, monkeypatch, 5)
    monkeypatch.setattr(runner, "_forward", replace(runner._forward, rule=RowRule(maximum=3)))
    monkeypatch.setattr(type(world.engine._loaded.model), "is_fused", False)
    driver = Driver(world.engine)
    for name in ("p15", "p16"):
        driver.add(name, world.prompts[name])
    driver.run()
    while min(len(driver.tokens[name]) for name in ("p15", "p16")) < NUM_TOKENS:
        for name in ("p15", "p16"):
            driver.compute(name, drafts=min(MOST_DRAFTS, NUM_TOKENS + 4 - len(driver.tokens[name])))
        driver.run()
    for name in ("p15", "p16"):
        check(world, driver, name)


def test_beside_a_row_that_wants_its_prompt_scored(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which runs in passes of its own, before those of the row with draft tokens."""
    proposer, driver = knowing(world, monkeypatch, 6), Driver(world.engine)
    driver.add("p15", world.prompts["p15"])
    driver.add("p33", world.prompts["p33"], 5, rare={"sampling": common_pb2.ResolvedSampling(num_prompt_logprobs=0)})
    driver.run()
    for _ in range(5):
        driver.compute("p15", drafts=2)
        driver.compute("p33", 4)
        driver.run()
    assert len(proposer.asked) == 5
    check(world, driver, "p15")


def test_memory_limits_draft_tokens(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step has no more of them than there is memory for their states; rows that get none go on as usual."""
    proposer, runner = knowing(world, monkeypatch, 7), world.engine._runner
    assert runner._most_drafts > 100
    monkeypatch.setattr(runner, "_most_drafts", 3)
    driver, names = Driver(world.engine), ("p15", "p16", "p33")
    for name in names:
        driver.add(name, world.prompts[name])
    driver.run()
    for _ in range(4):
        for name in names:
            driver.compute(name, drafts=2)
        driver.run()
        assert sum(count for _, count in proposer.asked[-3:]) <= 3
    for name in names:
        check(world, driver, name)


def check(world: World, driver: Driver, name: str) -> None:
    """The row's tokens are those of `generate`."""
    made, count = world.expected[name], len(driver.tokens[name])
    assert count >= 5
    Generated(made.token_ids[:count], made.logprobs[:count]).check(driver.tokens[name], driver.logprobs[name])


@ON_THE_HOST
def test_what_is_left_out_is_seen(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above can fail: where rejected tokens are not given up, the guard stops the next step."""
    proposer, driver = knowing(world, monkeypatch, 1), Driver(world.engine)
    monkeypatch.setattr(PossibleEnds, "settle", lambda *_: None)
    driver.add("p15", world.prompts["p15"])
    driver.run()
    with pytest.raises(FailedPrecondition, match="its states have taken in"):
        for _ in range(4):
            driver.compute("p15", drafts=2)
            driver.run()
    assert any(right < count for right, count in proposer.asked)


def test_a_step_that_fails_keeps_no_states(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The states of its possible ends are freed; the row is computed anew."""
    knowing(world, monkeypatch, 1)
    driver, model = Driver(world.engine), world.engine._loaded.model
    driver.add("p15", world.prompts["p15"])
    driver.run()
    driver.compute("p15", drafts=4)
    inner = model.logits

    def fails(inputs: object) -> object:
        inner(inputs)
        raise RuntimeError("after the pass")

    with monkeypatch.context() as within:
        within.setattr(model, "logits", fails)
        with pytest.raises(RuntimeError, match="after the pass"):
            driver.run()
    assert model._states.ends == PossibleEnds()
    driver = Driver(world.engine)
    driver.add("p15", world.prompts["p15"], room=NUM_TOKENS)
    for _ in range(6):
        driver.run()
    check(world, driver, "p15")


def test_no_checkpoint_behind_a_draft_token(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tokens may be rejected."""
    knowing(world, monkeypatch, 1)
    driver = Driver(world.engine)
    row = driver.add("p15", world.prompts["p15"])
    driver.run()
    driver.compute("p15", drafts=2)
    driver.keep("p15", row.computed + 2, 9)
    with pytest.raises(
        InvalidArgument, match=r"states_to_keep\.num_tokens: row 0, 17 tokens: the step does not compute"
    ):
        driver.run()
