"""Submit to tokens through a real scheduler and a simulated worker over gRPC; what ends a request, and that it ends once."""

import hashlib
import threading

import pytest

from protos.common.v1 import common_pb2
from protos.engine.v1 import engine_pb2, engine_pb2_grpc
from quire_tools.simulated_worker.engine import SimulatedEngine
from svc_common import wire_arrays
from svc_common.net import rpc
from tests.support.services.harness import TIMEOUT_S, Gateway, eventually, run_async, scheduler, stack, worker
from worker_svc.engine import Progress

PROMPT = list(range(32, 72))
SLOW = {"time_scale": 1.0, "step_base_s": 0.02, "num_gpu_blocks": 512}


@run_async
async def test_tokens_come_in_order_and_end_with_an_account() -> None:
    """The life of a request: started, tokens by offset, one end with what it used."""
    async with stack({"num_gpu_blocks": 512}) as s:
        handle = await s.gateway.submit(PROMPT, max_tokens=20, logprobs=True)
        output = await s.gateway.end_of(handle)
        assert output.failed is None and output.finished is not None and output.started is not None
        assert len(output.tokens) == len(output.logprobs) == 20
        assert all(value < 0 for value in output.logprobs)
        assert output.finished.last and output.finished.reason == common_pb2.FINISH_REASON_LENGTH
        account = output.finished.account
        assert (account.prompt_tokens, account.completion_tokens) == (len(PROMPT), 20)
        assert account.queue_ns > 0 and account.prefill_ns > 0 and account.decode_ns > 0 and account.worker_id
        await s.admin.assert_all_free()


@run_async
async def test_stop_token_is_named() -> None:
    """A stop token ends the request, is its last token and is named (R140)."""
    async with stack({"num_gpu_blocks": 512}) as s:
        tokens = (await s.gateway.end_of(await s.gateway.submit(PROMPT, max_tokens=12))).tokens
        stop = common_pb2.StopRules(max_tokens=50, ignore_eos=True, stop_token_ids=[tokens[3]])
        output = await s.gateway.end_of(await s.gateway.submit(PROMPT, stop=stop))
        first = tokens.index(tokens[3])
        assert output.tokens == tokens[: first + 1]
        assert output.finished is not None and output.finished.stop_token_id == tokens[3]
        assert output.finished.reason == common_pb2.FINISH_REASON_STOP


@run_async
async def test_the_second_prefill_computes_only_what_is_not_cached() -> None:
    """The same prompt twice: usage, step log and the worker's own count agree on what was reused."""
    async with stack({"num_gpu_blocks": 512}) as s:
        first = await s.gateway.end_of(await s.gateway.submit(PROMPT, request_id="one"))
        second = await s.gateway.end_of(await s.gateway.submit(PROMPT, request_id="two"))
        assert first.tokens == second.tokens
        assert first.started is not None and second.started is not None
        assert (first.started.cached_prompt_tokens, second.started.cached_prompt_tokens) == (0, 32)
        assert second.finished is not None and second.finished.account.cached_prompt_tokens == 32
        prefills = {r.scheduled[0].id: r for r in await s.admin.steps() if r.scheduled and r.scheduled[0].prefill}
        assert prefills["one"].computed_tokens == prefills["one"].scheduled[0].tokens == 40
        assert prefills["two"].computed_tokens == prefills["two"].scheduled[0].tokens == 8
        assert prefills["two"].scheduled[0].computed_before == 32


@run_async
async def test_equal_prompts_in_one_step_share_blocks() -> None:
    """The second hits blocks that the same step computes (R136); both get the tokens of one alone."""
    async with stack({"num_gpu_blocks": 512}) as s:
        submits = [s.gateway.make_submit(PROMPT) for _ in range(2)]
        await s.gateway.send(submits=submits)
        first, second = [await s.gateway.end_of(m.handle) for m in submits]
        assert first.tokens == second.tokens and len(first.tokens) == 8
        [prefill] = [r for r in await s.admin.steps() if any(g.prefill for g in r.scheduled)]
        assert [(g.tokens, g.computed_before) for g in prefill.scheduled] == [(40, 0), (8, 32)]
        assert prefill.computed_tokens == 48


@run_async
async def test_equal_prompts_that_start_together_under_v0() -> None:
    """v0 finds shared blocks by what was computed before the step, so both compute them; no step fails."""
    async with stack(policy="vllm-v0") as s:
        submits = [s.gateway.make_submit(PROMPT) for _ in range(3)]
        await s.gateway.send(submits=submits)
        outputs = [await s.gateway.end_of(m.handle) for m in submits]
        assert all(o.failed is None for o in outputs)
        assert len({tuple(o.tokens) for o in outputs}) == 1
        await s.admin.assert_all_free()


@run_async
async def test_many_requests_share_steps_under_preemption() -> None:
    """A pool too small for all: each gets the tokens that it gets alone (the simulated cache would notice a mixed-up block)."""
    prompts = [[40 + i, *range(50, 60 + i)] for i in range(8)]
    async with stack({"num_gpu_blocks": 512}) as s:
        alone = [(await s.gateway.end_of(await s.gateway.submit(p, max_tokens=24))).tokens for p in prompts]
    unrestrained = ("restraint=null",)
    async with stack({"num_gpu_blocks": 16}, max_num_batched_tokens=16, max_num_seqs=8, policy_set=unrestrained) as s:
        handles = [await s.gateway.submit(p, max_tokens=24) for p in prompts]
        outputs = [await s.gateway.end_of(h) for h in handles]
        assert [o.tokens for o in outputs] == alone
        assert sum(o.finished.account.num_preemptions for o in outputs if o.finished) > 0
        preempted = [o.finished.account for o in outputs if o.finished and o.finished.account.num_preemptions]
        assert all(account.preempted_ns > 0 for account in preempted)
        await s.admin.assert_all_free()


@run_async
async def test_a_stop_string_ends_at_its_offset() -> None:
    """Stopped: no abort, usage counts to the offset, the blocks are free."""
    async with stack(SLOW) as s:
        handle = await s.gateway.submit(PROMPT, max_tokens=1000)
        await s.gateway.tokens_of(handle, 5)
        await s.gateway.send(stops=[engine_pb2.Stopped(handle=handle, choice=0, token_offset=3)])
        output = await s.gateway.end_of(handle)
        assert output.finished is not None and output.finished.reason == common_pb2.FINISH_REASON_STOP
        assert output.finished.num_output_tokens == output.finished.account.completion_tokens == 3
        await s.admin.assert_all_free()


@run_async
async def test_cancel_by_handle_and_by_id_from_another_gateway() -> None:
    """Both ways end a request; its owner is told; unknown ids are nothing."""
    async with stack(SLOW) as s, Gateway(s.address, "gateway-2") as other:
        handles = [await s.gateway.submit(PROMPT[i:], max_tokens=1000, request_id=name) for i, name in enumerate("ab")]
        for handle in handles:
            await s.gateway.tokens_of(handle, 1)
        await s.gateway.send(cancels=[engine_pb2.Cancel(handle=handles[0]), engine_pb2.Cancel(handle=999)])
        await other.send(cancels=[engine_pb2.Cancel(request_id="b"), engine_pb2.Cancel(request_id="nobody")])
        for handle in handles:
            output = await s.gateway.end_of(handle)
            assert output.finished is not None and output.finished.reason == common_pb2.FINISH_REASON_CANCELLED
        await s.admin.assert_all_free()


@run_async
async def test_cancelled_blocks_are_free_before_the_next_plan() -> None:
    """The plan after a cancel counts its blocks as free and does not hold its table."""
    async with stack(SLOW) as s:
        keeps = await s.gateway.submit(PROMPT, max_tokens=400, request_id="keeps")
        await s.gateway.tokens_of(keeps, 1)
        goes = await s.gateway.submit(PROMPT, max_tokens=400, request_id="goes")
        await s.gateway.tokens_of(goes, 3)
        await s.gateway.send(cancels=[engine_pb2.Cancel(handle=goes)])
        await s.gateway.end_of(goes)
        before = len(s.gateway.outputs[keeps].tokens)
        await s.gateway.tokens_of(keeps, before + 2)
        reports = await s.admin.steps(tables=True)
        last = max(r.step for r in reports if "goes" in [g.id for g in r.scheduled])
        after = [r for r in reports if r.step > last]
        at_last = next(r for r in reports if r.step == last)
        assert after and all([t.sequence for t in r.tables] == ["keeps/0"] for r in after)
        freed = next(len(t.blocks) for t in at_last.tables if t.sequence == "goes/0")
        grown = len(after[0].tables[0].blocks) - len(at_last.tables[0].blocks)
        assert after[0].free.gpu == at_last.free.gpu + freed - 2 - grown  # the two share the prompt's two full blocks


@run_async
async def test_deadlines_in_queue_and_while_running() -> None:
    """DeadlineExceeded with where it passed; nothing is left behind."""
    async with stack(SLOW, max_num_seqs=1, max_num_batched_tokens=64) as s:
        running = await s.gateway.submit(PROMPT, max_tokens=1000, remaining_ns=1_000_000_000)
        await s.gateway.tokens_of(running, 1)
        queued = await s.gateway.submit(PROMPT, max_tokens=1000, remaining_ns=100_000_000)
        too_late = await s.gateway.submit(PROMPT, remaining_ns=1)
        reasons = []
        for handle in (too_late, queued, running):
            output = await s.gateway.end_of(handle)
            assert output.failed is not None and output.failed.error.status == "DEADLINE_EXCEEDED"
            reasons.append(output.failed.error.reason)
        assert reasons == ["EXPIRED_IN_QUEUE", "EXPIRED_IN_QUEUE", "DURING_DECODE"]
        assert s.gateway.outputs[running].failed.account.completion_tokens > 0
        await s.admin.assert_all_free()


@run_async
async def test_a_deadline_passes_while_there_is_no_worker() -> None:
    """Queueing is bounded in time even when no worker ever connects; the error names the address."""
    async with scheduler("127.0.0.1:1") as (address, _), Gateway(address) as gateway:
        handle = await gateway.submit(PROMPT, remaining_ns=200_000_000)
        output = await gateway.end_of(handle)
        assert output.failed is not None and output.failed.error.reason == "EXPIRED_IN_QUEUE"
        await eventually(lambda: "127.0.0.1:1" in gateway.states[-1].reason, "the reason names the worker")
        assert "--worker" in gateway.states[-1].reason and not gateway.states[-1].serving


@run_async
async def test_no_worker_for_too_long_is_unavailable() -> None:
    """Without a deadline of its own a request does not wait for ever."""
    async with scheduler("127.0.0.1:1", no_worker_timeout_s=0.2) as (address, _), Gateway(address) as gateway:
        output = await gateway.end_of(await gateway.submit(PROMPT))
        assert output.failed is not None and output.failed.error.status == "UNAVAILABLE"
        assert output.failed.error.reason == "NO_WORKER" and output.failed.error.retry_after_ns > 0


@run_async
async def test_requests_queue_while_the_worker_warms_up() -> None:
    """Accepted before any model is loaded, served as soon as one is; frontends hear about it."""
    may_load = threading.Event()

    class LoadsWhenLet(SimulatedEngine):
        def load(self, progress: Progress) -> common_pb2.ModelLimits:
            assert may_load.wait(TIMEOUT_S)
            return super().load(progress)

    async with (
        worker(LoadsWhenLet) as (worker_address,),
        scheduler(worker_address) as (address, _),
        Gateway(address) as gateway,
    ):
        assert not gateway.welcome.state.serving and not gateway.welcome.HasField("limits")
        handle = await gateway.submit(PROMPT)
        await eventually(lambda: "loading" in gateway.states[-1].reason, "it is told that a model is on its way")
        may_load.set()
        output = await gateway.end_of(handle)
        assert len(output.tokens) == 8
        assert gateway.states[-1].serving and gateway.states[-1].limits.vocab_size == 320
        assert any("loading" in state.reason for state in gateway.states)


@run_async
async def test_a_full_queue_refuses_with_a_retry_time() -> None:
    """Overload: RESOURCE_EXHAUSTED at once, QUEUE_FULL and when to come again; resubmitted requests are never refused."""
    async with stack(SLOW, max_num_seqs=1, max_num_batched_tokens=64, max_waiting_requests=3) as s:
        first = await s.gateway.submit(PROMPT, max_tokens=1_000)
        await s.gateway.tokens_of(first, 1)
        waiting = [await s.gateway.submit(PROMPT, max_tokens=2) for _ in range(3)]
        refused = await s.gateway.end_of(await s.gateway.submit(PROMPT))
        over = [s.gateway.outputs[handle].is_over for handle in (first, *waiting)]
        assert not any(over), "at once, before any that was there"
        assert refused.failed is not None
        error = refused.failed.error
        assert (error.status, error.reason) == ("RESOURCE_EXHAUSTED", "QUEUE_FULL") and error.retry_after_ns > 0
        again = await s.gateway.submit(PROMPT, max_tokens=2, resubmitted=True)
        await s.gateway.leave(first)
        for handle in [*waiting, again]:
            assert (await s.gateway.end_of(handle)).finished is not None


@run_async
async def test_priority_goes_first() -> None:
    """Core polarity: the lower number is served sooner."""
    async with stack(SLOW, max_num_seqs=1, max_num_batched_tokens=64) as s:
        first = await s.gateway.submit(PROMPT, max_tokens=4)
        await s.gateway.tokens_of(first, 1)
        low, high = [await s.gateway.submit(PROMPT, max_tokens=2, priority=p) for p in (5, -5)]
        await s.gateway.end_of(low)
        assert s.gateway.outputs[high].is_over
        assert s.gateway.outputs[high].finished.account.queue_ns < s.gateway.outputs[low].finished.account.queue_ns


@run_async
async def test_a_known_id_attaches_and_commits_are_not_repeated() -> None:
    """Submit is idempotent by (tenant, id); tokens continue after the committed ones; another prompt is refused."""
    async with stack({"num_gpu_blocks": 512}) as s:
        whole = (await s.gateway.end_of(await s.gateway.submit(PROMPT, max_tokens=30))).tokens
        handle = await s.gateway.submit(
            PROMPT, max_tokens=30, request_id="again", committed=whole[:12], resubmitted=True
        )
        s.gateway.outputs[handle].tokens += whole[:12]
        output = await s.gateway.end_of(handle)
        assert output.tokens == whole
        assert output.finished is not None and output.finished.account.completion_tokens == 30
        done = await s.gateway.submit(PROMPT, max_tokens=12, request_id="done", committed=whole[:12])
        ended = await s.gateway.end_of(done)
        assert ended.finished is not None and ended.finished.reason == common_pb2.FINISH_REASON_LENGTH


@run_async
async def test_one_id_is_one_request() -> None:
    """Same id and tenant, other prompt: ALREADY_EXISTS. Same id, other tenant: another request."""
    async with stack(SLOW) as s:
        first = await s.gateway.submit(PROMPT, max_tokens=200, request_id="x")
        await s.gateway.tokens_of(first, 1)
        clash = await s.gateway.end_of(await s.gateway.submit(PROMPT[1:], request_id="x"))
        assert clash.failed is not None and clash.failed.error.reason == "REQUEST_ID_IN_USE"
        other = await s.gateway.end_of(await s.gateway.submit(PROMPT[1:], request_id="x", tenant="t"))
        assert other.finished is not None
        assert not s.gateway.outputs[first].is_over
        await s.gateway.send(cancels=[engine_pb2.Cancel(handle=first)])


@run_async
async def test_the_model_bundle_is_relayed() -> None:
    """Bytes with the promised digest; another digest is NOT_FOUND; before a model UNAVAILABLE with a retry time."""
    async with stack({"num_gpu_blocks": 512}) as s:
        channel = rpc.channel(s.address)
        stub = engine_pb2_grpc.EngineServiceStub(channel)
        digest = s.gateway.states[-1].limits.bundle_digest
        call = stub.GetModelBundle(engine_pb2.GetModelBundleRequest(digest=digest))
        bundle = b"".join([piece.chunk async for piece in call])
        assert hashlib.sha256(bundle).hexdigest() == digest
        with pytest.raises(rpc.grpc.RpcError) as error:
            await anext(aiter(stub.GetModelBundle(engine_pb2.GetModelBundleRequest(digest="other"))))
        assert rpc.from_rpc_error(error.value).status == "NOT_FOUND"
        await channel.close()


@run_async
async def test_too_long_for_model_or_cache_is_out_of_range() -> None:
    """R23: never a finish reason; the limit is in the error."""
    async with stack({"num_gpu_blocks": 9, "max_model_len": 4096}) as s:
        for length in (200, 4096):
            output = await s.gateway.end_of(await s.gateway.submit([40] * length))
            assert output.failed is not None and output.failed.error.status == "OUT_OF_RANGE"
            assert int(output.failed.error.metadata["limit"]) in {128, 4095}
        assert (await s.gateway.end_of(await s.gateway.submit(PROMPT))).finished is not None


@run_async
async def test_output_that_outgrows_the_cache_fails_alone() -> None:
    """A request whose output cannot fit even alone ends OUT_OF_RANGE, and the next one is served (R51, R197)."""
    async with stack({"num_gpu_blocks": 5}) as s:
        output = await s.gateway.end_of(await s.gateway.submit(PROMPT, max_tokens=500))
        assert output.failed is not None and output.failed.error.status == "OUT_OF_RANGE"
        assert len(output.tokens) > 0
        assert (await s.gateway.end_of(await s.gateway.submit(PROMPT[:8]))).finished is not None
        await s.admin.assert_all_free()


BAD_SUBMITS = [
    ("token_ids", {"raw_tokens": b"\1\2\3"}),
    ("token_ids", {"raw_tokens": b""}),
    ("token_ids", {"raw_tokens": wire_arrays.pack([-1])}),
    ("token_ids", {"raw_tokens": wire_arrays.pack([320])}),
    ("request_id", {"request_id": ""}),
    ("request_id", {"request_id": "x" * 600}),
    ("num_choices", {"num_choices": 129}),
    ("best_of", {"num_choices": 3, "best_of": 2}),
    ("task", {"num_choices": 2, "task": common_pb2.TASK_EMBED_MEAN}),
    ("stop.max_tokens", {"stop": common_pb2.StopRules(max_tokens=0, ignore_eos=True)}),
    ("stop.min_tokens", {"stop": common_pb2.StopRules(max_tokens=1, min_tokens=2)}),
    ("sampling.temperature", {"sampling": common_pb2.ResolvedSampling(temperature=float("nan"), top_p=1)}),
    ("sampling.temperature", {"sampling": common_pb2.ResolvedSampling(temperature=-1, top_p=1)}),
    ("sampling.top_p", {"sampling": common_pb2.ResolvedSampling(top_p=0)}),
    ("sampling.top_p", {"sampling": common_pb2.ResolvedSampling(top_p=float("nan"))}),
    ("committed.token_ids", {"committed": [320]}),
]


@run_async
async def test_bad_submits_fail_alone_and_name_the_field() -> None:
    """Every malformed request gets its typed error; a good one running beside them is not disturbed."""
    async with stack(SLOW) as s:
        good = await s.gateway.submit(PROMPT, max_tokens=30)
        for field, wrong in BAD_SUBMITS:
            values = dict(wrong)
            raw = values.pop("raw_tokens", None)
            message = s.gateway.make_submit(PROMPT, **values)
            if raw is not None:
                message.token_ids = raw
            await s.gateway.send(submits=[message])
            output = await s.gateway.end_of(message.handle)
            assert output.failed is not None and output.failed.error.status == "INVALID_ARGUMENT"
            assert [v.field for v in output.failed.error.field_violations] == [field]
        output = await s.gateway.end_of(good)
        assert output.finished is not None and len(output.tokens) == 30
        assert all(output.num_ends == 1 for output in s.gateway.outputs.values())
