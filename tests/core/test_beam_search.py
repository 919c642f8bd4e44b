"""Beam search: which hypotheses survive, what becomes of their blocks, and how the best are given (R21, R25, R94)."""

import pytest

from scheduler_svc.core.plan import StepOutcome, StepPlan, StepResult
from scheduler_svc.core.request import Group, Request, SequenceStatus
from scheduler_svc.core.request_rules import BeamRules
from scheduler_svc.core.scheduler import Scheduler
from tests.support.core.builders import EOS
from tests.support.core.v0_builders import add, answer, group_of, make_request, make_v0

Candidates = dict[str, list[tuple[int, float]]]


def tell(core: Scheduler, candidates: Candidates) -> tuple[StepPlan, StepOutcome]:
    """A step whose beams have these next tokens."""
    [plan] = core.schedule(0)
    return plan, core.update(StepResult(plan.step, candidates=candidates))


def survive(core: Scheduler, chosen: dict[str, int]) -> tuple[StepPlan, StepOutcome]:
    """A step in which so many continuations of each beam are the best ones."""
    group = group_of(core, "a")
    first = group.live[0].num_tokens * 10
    return tell(
        core,
        {
            beam.name: [(first + i, -0.1 if i < chosen.get(beam.name, 0) else -9.0 - i) for i in range(2 * group.width)]
            for beam in group.live
        },
    )


def scored(rules: BeamRules, hypotheses: list[tuple[int, float]], n: int) -> list[int]:
    """Indexes of the best, of finished hypotheses given by (output tokens, sum of logprobs)."""
    request = make_request("a", 4, n=n, best_of=len(hypotheses), beam=rules)
    group = request.groups[0]
    for index in range(1, len(hypotheses)):
        group.add(group.sequences[0].fork(index))
    for sequence, (num_output, logprob) in zip(group.sequences, hypotheses, strict=True):
        sequence.token_ids += [5] * num_output
        sequence.status, sequence.cumulative_logprob = SequenceStatus.FINISHED_LENGTH_CAPPED, logprob
    return [s.index for s in request.best_sequences()]


class TestTree:
    """R21: the article's tree: four beams, whose next best four all descend from the second and third."""

    @staticmethod
    def core() -> Scheduler:
        """Four beams of 9 tokens: the prompt's block is shared by all, each has two more of its own."""
        core = make_v0(num_gpu_blocks=20)
        add(core, "a", 4, 40, n=4, beam=BeamRules())
        survive(core, {"a/0": 4})
        for _ in range(5):
            survive(core, dict.fromkeys(("a/0", "a/1", "a/2", "a/3"), 1))
        assert [len(table) for table in core.block_tables().values()] == [3] * 4
        assert core.state.cache.num_free_gpu == 20 - 1 - 4 * 2
        return core

    def test_parents_without_children_free_what_only_they_held(self) -> None:
        """R21: the first and the fourth go, with their two blocks each; the prompt's block stays shared by all."""
        core = self.core()
        before = core.block_tables()
        _, outcome = survive(core, {"a/1": 2, "a/2": 2})
        assert outcome.dropped == ["a/0", "a/3"]
        after = core.block_tables()
        assert list(after) == ["a/1", "a/2", "a/4", "a/5"]
        assert core.state.cache.num_free_gpu == 11 + 4
        gone = {b for name in ("a/0", "a/3") for b in before[name][1:]}
        assert not gone & {b for table in after.values() for b in table}
        assert {table[0] for table in after.values()} == {before["a/1"][0]}
        assert core.pool_report().refs[before["a/1"][0]] == 4
        assert core.check_integrity() == []

    def test_parents_of_several_children_share_all_they_have(self) -> None:
        """R20, R21: and of two that share a last block one copies it, the other writes in place."""
        core = self.core()
        survive(core, {"a/1": 2, "a/2": 2})
        tables = core.block_tables()
        assert (tables["a/1"], tables["a/2"]) == (tables["a/4"], tables["a/5"])
        plan, _ = survive(core, dict.fromkeys(("a/1", "a/2", "a/4", "a/5"), 1))
        assert [f"g{source}" for source, _ in plan.copy] == [tables["a/1"][2], tables["a/2"][2]]
        after = core.block_tables()
        assert len({table[2] for table in after.values()}) == 4
        assert [after[name][:2] for name in after] == [tables[name][:2] for name in after]

    def test_blocks_go_along_the_history(self) -> None:
        """R21: with its last descendant a whole branch is freed, also what its ancestors wrote."""
        core = self.core()
        survive(core, {"a/1": 2, "a/2": 2})
        survive(core, dict.fromkeys(("a/1", "a/2", "a/4", "a/5"), 1))
        branch = core.block_tables()["a/2"][1:]
        _, outcome = survive(core, {"a/1": 4})
        assert outcome.dropped == ["a/2", "a/4", "a/5"]
        tables = core.block_tables()
        assert len({tuple(table) for table in tables.values()}) == 1
        assert not set(branch) & set(tables["a/1"])
        assert core.state.cache.num_free_gpu == 20 - 3
        assert core.pool_report().refs == dict.fromkeys(tables["a/1"], 4)

    def test_tokens_are_those_of_the_path(self) -> None:
        """R94: a child has its parent's past and its own last token."""
        core = self.core()
        past = {s.name: list(s.token_ids) for s in group_of(core, "a").live}
        _, outcome = survive(core, {"a/1": 2, "a/2": 2})
        parents = {run.name: run.forked_from or run.name for run in outcome.runs}
        assert parents == {"a/1": "a/1", "a/4": "a/1", "a/2": "a/2", "a/5": "a/2"}
        assert {s.name: s.token_ids[:-1] for s in group_of(core, "a").live} == {
            name: past[parent] for name, parent in parents.items()
        }


@pytest.mark.parametrize(("penalty", "best"), [(0.0, [0, 1]), (1.0, [1, 0]), (2.0, [1, 0])])
def test_the_length_penalty_favours_long_hypotheses(penalty: float, best: list[int]) -> None:
    """R25: score = sum of logprobs / output tokens ** penalty: -2.0 over 2 against -2.2 over 8."""
    assert scored(BeamRules(length_penalty=penalty), [(2, -2.0), (8, -2.2)], n=2) == best


def test_the_n_best_are_given() -> None:
    """R25: of best_of beams, best first."""
    assert scored(BeamRules(), [(2, -3.0), (2, -1.0), (2, -2.0)], n=2) == [1, 2]


def early(stopping: bool | str, second: float) -> tuple[bool, list[int]]:
    """Two beams: a hypothesis ends at once, a second one with score -0.175; is it over, and which are best? The best live one then
    has `second` as its last logprob."""
    core = make_v0()
    request = add(core, "a", 3, n=2, beam=BeamRules(early_stopping=stopping))
    tell(core, {"a/0": [(EOS, -0.1), (5, -0.2), (6, -0.3), (7, -4.0)]})
    tell(
        core,
        {
            "a/0": [(EOS, -0.15), (8, second), (9, -9.0), (10, -9.0)],
            "a/1": [(8, second), (9, -9.0), (10, -9.0), (11, -9.0)],
        },
    )
    return not core.has_unfinished, [s.index for s in request.best_sequences()] if request.is_finished else []


@pytest.mark.parametrize(
    ("stopping", "second", "is_over"),
    [(True, -0.1, True), (False, -0.1, False), (False, -1.8, True), ("never", -1.8, False), ("never", -90.0, True)],
)
def test_when_a_search_is_over(stopping: bool | str, second: float, is_over: bool) -> None:
    """R21, R25: True: with enough hypotheses; False: when no live one is better by today's length; "never": by any length."""
    assert early(stopping, second) == (is_over, [2, 0] if is_over else [])


def test_a_worse_ending_is_no_hypothesis() -> None:
    """R21: of those that end only the best `width` of all times count; live beams are kept beside them."""
    core = make_v0()
    add(core, "a", 3, n=2, beam=BeamRules(early_stopping="never"))
    tell(core, {"a/0": [(5, -0.1), (6, -0.2), (7, -5.0), (8, -6.0)]})
    rest = [(7, -8.0), (8, -8.0)]
    _, outcome = tell(core, {"a/0": [(EOS, -0.1), (9, -0.2), *rest], "a/1": [(EOS, -0.05), (9, -0.2), *rest]})
    assert len(outcome.ended) == 2
    live = [s.name for s in group_of(core, "a").live]
    _, outcome = tell(core, {name: [(EOS, -7.0), (9, -0.1), *rest] for name in live})
    assert outcome.ended == []
    assert len(group_of(core, "a").live) == 2


def test_beams_end_at_max_tokens() -> None:
    """R95: all live ones at once, ranked by score."""
    core = make_v0()
    request = add(core, "a", 3, 2, n=2, beam=BeamRules())
    tell(core, {"a/0": [(5, -0.1), (6, -0.2), (7, -5.0), (8, -6.0)]})
    rest = [(8, -8.0), (9, -8.0), (10, -8.0)]
    _, outcome = tell(core, {"a/0": [(7, -3.0), *rest], "a/1": [(7, -0.1), *rest]})
    assert {e.status for e in outcome.ended} == {SequenceStatus.FINISHED_LENGTH_CAPPED}
    assert not core.has_unfinished
    assert [s.token_ids[3:] for s in request.best_sequences()] == [[6, 7], [5, 7]]


def beam_answer(core: Scheduler, plan: StepPlan) -> StepResult:
    """Beams get candidates that depend on their tokens alone; others what they always get."""
    result = answer(core, plan)
    for entry in plan.scheduled:
        group: Group | None = group_of(core, entry.request_id)
        if group is None or group.request.beam is None or not entry.samples:
            continue
        result.children.pop(entry.name, None)
        result.tokens.pop(entry.name, None)
        seed = sum((i + 1) * t for i, t in enumerate(group.find(entry.index).token_ids))
        result.candidates[entry.name] = [
            (1 + (seed * 31 + i * 17) % 997, -0.3 - (seed * (i + 3)) % 7 / 5 - i / 9) for i in range(2 * group.width)
        ]
    return result


def search(preset: str, **given: object) -> tuple[list[list[int]], int, int]:
    """Tokens of the beams, best first; preemptions; steps in which the beams were computed again."""
    core = make_v0(preset, **given)
    add(core, "x", 8, 12)
    beams: Request = add(core, "b", 6, 6, n=3, beam=BeamRules())
    num_resumed = 0
    while core.has_unfinished:
        [plan] = core.schedule(0)
        resumed = [e for e in plan.scheduled if e.resumed and e.is_prefill and e.request_id == "b"]
        num_resumed += bool(resumed)
        if len(resumed) > 1:
            tables = core.block_tables()
            assert len({tables[e.name][0] for e in resumed}) == 1, "the prompt's full block is shared"
        core.update(beam_answer(core, plan))
        assert core.check_integrity() == []
    return [s.token_ids[6:] for s in beams.best_sequences()], core.state.shared.num_cumulative_preemptions, num_resumed


@pytest.mark.parametrize("preset", ["vllm-v0", "vllm-2023", "vllm-v1"])
def test_beams_that_are_computed_again_go_on_alike(preset: str) -> None:
    """R21, R27, R76: several live beams leave, wait, start again with the prompt's blocks shared, and end with the same tokens."""
    mode = {} if preset == "vllm-v1" else {"preemption_mode": "recompute"}
    wide, no_preemptions, _ = search(preset, num_gpu_blocks=60, **mode)
    tight, num_preemptions, num_resumed = search(preset, num_gpu_blocks=9, **mode)
    assert no_preemptions == 0
    assert num_preemptions > 0
    assert num_resumed > 0
    assert tight == wide
    assert [len(tokens) for tokens in wide] == [6] * 3


@pytest.mark.parametrize("preset", ["vllm-v0", "vllm-2023"])
def test_beams_that_were_on_the_host_go_on_alike(preset: str) -> None:
    """R21, R73: swapped out and in with what they share."""
    wide, _, _ = search(preset, num_gpu_blocks=60)
    tight, num_preemptions, _ = search(preset, num_gpu_blocks=10)
    assert num_preemptions > 0
    assert tight == wide


def test_beams_are_one_group_everywhere() -> None:
    """R28: they compete, so v1, which schedules samples apart, keeps them together too."""
    core = make_v0("vllm-v1")
    assert len(add(core, "a", 3, n=3, beam=BeamRules()).groups) == 1
    assert len(add(core, "b", 3, n=3).groups) == 3
