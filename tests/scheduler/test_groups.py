"""Requests with several choices through the service: samples, ranked samples, beams (R21, R25, R94)."""

import pytest

from protos.common.v1 import common_pb2
from protos.engine.v1 import engine_pb2
from svc_common import wire_arrays
from tests.support.services.harness import run_async, stack

PROMPT = list(range(20, 60))
SAMPLED = {"sampling": common_pb2.ResolvedSampling(temperature=1.0, top_p=1.0, seed=11)}


@pytest.mark.parametrize("policy", ["quire", "vllm-v1", "vllm-v0", "chitu"])
@run_async
async def test_samples_are_streamed_as_choices_and_end_one_by_one(policy: str) -> None:
    """R25: n sequences, each as if it were alone with its index; every choice ends once, the last with the account."""
    async with stack(policy=policy) as s:
        three = await s.gateway.end_of(await s.gateway.submit(PROMPT, max_tokens=12, num_choices=3, **SAMPLED))
        assert [len(choice) for choice in three.choices] == [12, 12, 12]
        assert len({tuple(choice) for choice in three.choices}) == 3
        assert sorted(three.ends) == [0, 1, 2]
        assert [end.last for end in three.ends.values()].count(True) == 1
        assert three.finished is not None and three.finished.account.completion_tokens == 36
        again = await s.gateway.end_of(await s.gateway.submit(PROMPT, max_tokens=12, num_choices=2, **SAMPLED))
        assert again.choices == three.choices[:2]


@pytest.mark.parametrize("policy", ["vllm-v0", "vllm-v0-chunked"])
@run_async
async def test_several_decode_steps_in_one_message_give_the_same_tokens(policy: str) -> None:
    """R91: up to k decode steps for a plan of decodes alone; tokens are those of single steps, blocks suffice, ends are met."""
    prompts = [list(range(20 + i, 40 + 3 * i)) for i in range(6)]
    found, num_steps = [], []
    for sets in ([], ["num_scheduler_steps=4"]):
        async with stack(policy=policy, policy_set=sets, num_gpu_blocks=24) as s:
            handles = [await s.gateway.submit(p, max_tokens=7 + 5 * i) for i, p in enumerate(prompts)]
            found.append([(await s.gateway.end_of(handle)).tokens for handle in handles])
            num_steps.append(len(await s.admin.steps()))
            await s.admin.assert_all_free()
    assert found[0] == found[1]
    assert num_steps[1] < num_steps[0] / 2
    assert [len(tokens) for tokens in found[0]] == [7 + 5 * i for i in range(6)]


@pytest.mark.parametrize("policy", ["quire", "vllm-v0"])
@run_async
async def test_choices_go_on_after_what_was_delivered(policy: str) -> None:
    """R25, R27: submitted again with the tokens of each choice, each goes on after its own; those that had ended stay so."""
    async with stack(policy=policy) as s:
        values = {"max_tokens": 14, "num_choices": 3, **SAMPLED}
        whole = (await s.gateway.end_of(await s.gateway.submit(PROMPT, **values))).choices
        message = s.gateway.make_submit(PROMPT, **values)
        delivered = [whole[0][:5], whole[1], whole[2][:1]]
        message.resubmitted = True
        message.committed.extend(
            engine_pb2.CommittedTokens(choice=i, token_ids=wire_arrays.pack(run)) for i, run in enumerate(delivered)
        )
        output = s.gateway.outputs[message.handle]
        for choice, run in enumerate(delivered):
            output.of(choice).extend(run)
        await s.gateway.send(submits=[message])
        await s.gateway.end_of(message.handle)
        assert output.choices == whole
        assert sorted(output.ends) == [0, 1, 2]
        await s.admin.assert_all_free()


@pytest.mark.parametrize("policy", ["quire", "vllm-v0", "vllm-v1"])
@run_async
async def test_ranked_choices_come_at_the_end_best_first(policy: str) -> None:
    """R21, R25: best_of and beams are ranked when all sequences are over; every choice says its score."""
    async with stack(policy=policy) as s:
        best = await s.gateway.end_of(await s.gateway.submit(PROMPT, max_tokens=9, num_choices=2, best_of=4, **SAMPLED))
        beams = await s.gateway.end_of(
            await s.gateway.submit(PROMPT, max_tokens=9, num_choices=3, best_of=4, beam=common_pb2.BeamRules())
        )
        for output, wanted in ((best, 2), (beams, 3)):
            scores = [output.ends[choice].score for choice in range(wanted)]
            assert scores == sorted(scores, reverse=True)
            assert [len(choice) for choice in output.choices] == [9] * wanted
        assert len({tuple(choice) for choice in beams.choices}) == 3
        await s.admin.assert_all_free()


@pytest.mark.parametrize("policy", ["quire", "vllm-v1-async", "vllm-v0", "chitu"])
@run_async
async def test_a_beam_that_is_alone_is_a_beam(policy: str) -> None:
    """R25: best_of = 1 with beams: its tokens are the core's to choose, so it is not planned ahead; no step fails by it."""
    async with stack(policy=policy) as s:
        output = await s.gateway.end_of(await s.gateway.submit(PROMPT, max_tokens=9, beam=common_pb2.BeamRules()))
        assert output.finished is not None and len(output.tokens) == 9
        assert output.finished.account.num_migrations == 0
        assert not [step.error for step in await s.admin.steps() if step.error]
