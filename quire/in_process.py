"""The engine in this process: scheduler core, row planner and model engine in one loop, without RPC (R4-R8).

The same classes that the services run, driven by `step()`: schedule, encode, execute, decode, update, text. Not here: prompts in
many forms and the waiting for results (quire.llm), the behaviour behind a gateway (quire.remote).
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gateway_svc import validation
from gateway_svc.bundle import TextModel
from gateway_svc.text_stream import Piece, TextStream
from protos.common.v1 import common_pb2
from protos.worker.v1 import worker_pb2
from quire import messages
from quire.llm_settings import named_as_in_python
from quire.messages import Prompt, RequestOptions
from quire.outputs import CompletionOutput, RequestOutput
from quire.sampling_params import SamplingParams
from quire.scheduling import scheduler_settings
from quire.stack import default_model
from scheduler_svc.core.plan import EndedSequence, StepPlan, TokenRun
from scheduler_svc.core.request import Request, SequenceStatus, StopRules
from scheduler_svc.policy_choice import PolicyChoice, WorkerSize
from scheduler_svc.row_planner import RowPlanner, RowSampling, WorkerResult
from svc_common.clock import NS_PER_S, monotonic_ns
from svc_common.errors import AlreadyExists, Internal, QuireError
from worker_svc.engine import Engine, Progress
from worker_svc.model_engine import ModelEngine
from worker_svc.settings import WorkerSettings

_FINISH_REASONS = {
    SequenceStatus.FINISHED_STOPPED: "stop",
    SequenceStatus.FINISHED_LENGTH_CAPPED: "length",
    SequenceStatus.FINISHED_ABORTED: "abort",
}


@dataclass(slots=True, eq=False)
class _Live:
    """A request that is not over: what came out, and its way to text. `logprobs`: of tokens from the first on."""

    output: RequestOutput
    text: TextStream
    sampling: RowSampling
    request: Request
    logprobs: list[float] = field(default_factory=list)

    @property
    def completion(self) -> CompletionOutput:
        """Its only output."""
        return self.output.outputs[0]

    def take(self, piece: Piece) -> None:
        """Adds text with its tokens; both are held back together, so that text is a function of tokens."""
        ids = piece.token_ids
        start = piece.token_offset
        logprobs = self.logprobs[start : start + len(ids)] if self.sampling.logprobs else None
        if ids or piece.text:
            self.completion.extend(piece.text, ids, logprobs)

    def end(self, finish_reason: str, stop_reason: int | str | None) -> None:
        """It is complete."""
        self.completion.finish_reason, self.completion.stop_reason = finish_reason, stop_reason
        self._account()

    def fail(self, error: QuireError) -> None:
        """It ended without result; never a finish reason."""
        self.output.error = error
        self._account()

    def _account(self) -> None:
        self.output.finished = True
        self.output.num_cached_tokens = self.request.num_cached_tokens or 0
        self.output.num_preemptions = self.request.sequences[0].num_preemptions


class InProcessEngine:
    """Owner of core, planner, engine and the live requests. One thread calls it."""

    def __init__(
        self, engine: Engine, choice: PolicyChoice, *, draw_seed: Callable[[], int], progress: Progress
    ) -> None:
        """Loads, profiles, allocates (R8). ConfigError says what is wrong with model or memory and what to do."""
        self._engine = engine
        self._draw_seed = draw_seed
        self.limits: common_pb2.ModelLimits = engine.load(progress)
        self.limits.max_model_len = max_model_len = choice.max_model_len(self.limits.max_model_len)
        memory = self.memory = engine.profile(*choice.largest_step(max_model_len))
        fit = choice.core_limits(
            WorkerSize(memory.block_size, memory.num_gpu_blocks, memory.num_cpu_blocks, max_model_len)
        )
        engine.allocate(fit.num_gpu_blocks, fit.num_cpu_blocks)
        self.text_model = TextModel.from_bundle(engine.bundle())
        self._defaults = validation.SamplingDefaults.from_generation_config(self.text_model.generation_config)
        self._core = choice.build(fit)
        self._planner = RowPlanner(fit.max_num_seqs)
        self._live: dict[str, _Live] = {}
        self._aborted: list[RequestOutput] = []

    # --- requests ------------------------------------------------------------------------------------------------

    def add(self, request_id: str, prompt: Prompt, params: SamplingParams, options: RequestOptions) -> None:
        """Queues a request. InvalidArgument, OutOfRange or AlreadyExists where it cannot be taken."""
        if request_id in self._live:
            raise AlreadyExists(f"request {request_id} is running already", reason="DUPLICATE_REQUEST")
        resolved = self.resolve(prompt, params, options)
        request = _core_request(request_id, resolved, self.limits)
        self._core.add(request)
        self._live[request_id] = self._new_live(request, resolved, prompt)

    def resolve(self, prompt: Prompt, params: SamplingParams, options: RequestOptions) -> validation.ResolvedRequest:
        """The request with every default applied, checked exactly as a gateway checks it."""
        message = messages.generate_request(prompt, params, options)
        validation.check_parameters(message, self.limits)
        ids = self.text_model.encode(prompt) if isinstance(prompt, str) else list(prompt)
        return validation.resolve(message, ids, self.limits, self._defaults, draw_seed=self._draw_seed)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Ends requests; their blocks are free at once. Unknown and finished ids are ignored (R35)."""
        for ended in self._core.abort(sorted(request_ids)):
            live = self._live.pop(ended.request_id)
            live.take(live.text.finish())
            live.end("abort", None)
            self._aborted.append(live.output)

    def discard(self, request_ids: Iterable[str]) -> None:
        """Ends requests, and nothing more is told of them."""
        gone = set(request_ids)
        self.abort(gone)
        self._aborted = [output for output in self._aborted if output.request_id not in gone]

    def has_unfinished(self) -> bool:
        """Whether `step` has anything to do or to tell."""
        return bool(self._live or self._aborted)

    def _new_live(self, request: Request, resolved: validation.ResolvedRequest, prompt: Prompt) -> _Live:
        s = resolved.sampling
        output = RequestOutput(
            request_id=request.request_id,
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_token_ids=resolved.prompt_token_ids,
            outputs=[CompletionOutput(0)],
            seed=s.seed,
            num_prompt_tokens=len(resolved.prompt_token_ids),
            model=self.limits.model,
        )
        text = TextStream(self.text_model, resolved.stop_strings, min_tokens=resolved.stop.min_tokens)
        sampling = RowSampling(s.temperature, s.top_p, s.top_k, s.seed, s.logprobs)
        return _Live(output, text, sampling, request)

    def close(self) -> None:
        """Ends what runs."""
        self.abort(list(self._live))
        self._engine.reset()

    # --- steps ---------------------------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Runs one step (R5) and returns the requests that have something new; finished ones for the last time."""
        touched: dict[str, RequestOutput] = {output.request_id: output for output in self._aborted}
        self._aborted.clear()
        for plan in self._core.schedule(monotonic_ns() / NS_PER_S):
            self._end_all(plan.ended, touched)
            if plan.left or not plan.is_empty:
                self._run(plan, touched)
        return list(touched.values())

    def _run(self, plan: StepPlan, touched: dict[str, RequestOutput]) -> None:
        message = self._planner.encode(plan, lambda request_id: self._live[request_id].sampling)
        try:
            result = self._decoded(message)
        except QuireError as error:
            self._fail(plan, error, touched)
            return
        outcome = self._core.update(result.result, monotonic_ns() / NS_PER_S)
        for run in outcome.runs:
            self._take(run, result.logprobs.get(run.name), outcome.ended, touched)
        self._end_all(outcome.ended, touched)

    def _decoded(self, message: worker_pb2.SchedulerOutputs) -> WorkerResult:
        output = self._engine.execute(message)
        output.step_id, output.epoch = message.step_id, message.epoch
        result = self._planner.decode(output)
        if result is None:
            raise Internal(f"the engine answered step {output.step_id}, which is not awaited")
        return result

    def _fail(self, plan: StepPlan, error: QuireError, touched: dict[str, RequestOutput]) -> None:
        """The step could not run: its requests fail, nobody else."""
        void = worker_pb2.WorkerOutputs(step_id=self._planner.last_step_id, epoch=self._planner.epoch)
        self._planner.decode(void)
        outcome = self._core.fail_step(plan.step, error.message)
        for ended in outcome.ended:
            live = self._live.pop(ended.request_id)
            live.fail(error)
            touched[ended.request_id] = live.output

    def _take(
        self,
        run: TokenRun,
        logprobs: list[float] | None,
        ended: list[EndedSequence],
        touched: dict[str, RequestOutput],
    ) -> None:
        live = self._live[run.request_id]
        live.logprobs += (logprobs or [])[: len(run.token_ids)]
        by_token = any(end.name == run.name and end.stop_token_id is not None for end in ended)
        piece = live.text.push(run.token_ids, ends_with_stop_token=by_token)
        live.take(piece)
        touched[run.request_id] = live.output
        if piece.stopped_by is not None:
            self._core.stop_at(run.name, piece.num_output_tokens)
            live.end("stop", piece.stopped_by)
            del self._live[run.request_id]

    def _end_all(self, ended: Iterable[EndedSequence], touched: dict[str, RequestOutput]) -> None:
        for end in ended:
            live = self._live.pop(end.request_id, None)
            if live is None:
                continue  # a stop string ended it before
            live.take(live.text.finish())
            if end.error is not None:
                live.fail(Internal(end.error, reason="STEP_FAILED"))
            elif live.text.stopped_by is not None:
                live.end("stop", live.text.stopped_by)
            else:
                live.end(_FINISH_REASONS[end.status], end.stop_token_id)
            touched[end.request_id] = live.output


def _core_request(request_id: str, resolved: validation.ResolvedRequest, limits: common_pb2.ModelLimits) -> Request:
    stop = resolved.stop
    rules = StopRules(
        max_tokens=stop.max_tokens,
        min_tokens=stop.min_tokens,
        ignore_eos=stop.ignore_eos,
        eos_token_ids=frozenset(limits.eos_token_ids),
        stop_token_ids=frozenset(stop.stop_token_ids),
    )
    return Request(
        request_id=request_id,
        prompt_token_ids=resolved.prompt_token_ids,
        stop=rules,
        arrival_time=monotonic_ns() / NS_PER_S,
        priority=-resolved.priority,
        cache_salt=resolved.cache_salt,
        no_cache_reuse=resolved.no_cache_reuse,
    )


# --- the composition root ----------------------------------------------------------------------------------------------


def load(
    model: str | Path | None,
    scheduling: Mapping[str, Any],
    worker_settings: Mapping[str, Any],
    draw_seed: Callable[[], int],
) -> InProcessEngine:
    """An engine with the checkpoint `model` (None = the built-in one). Settings: fields of SchedulerSettings, WorkerSettings.

    ConfigError, by the options' Python names, for what cannot work; numbers are checked before anything is loaded.
    """
    choice = scheduler_settings(str, **scheduling).policy_choice()
    with named_as_in_python():
        given = {**worker_settings, "model": model or default_model()}
        settings = WorkerSettings.of(**{name: value for name, value in given.items() if value is not None})
        engine = ModelEngine(settings)
        return InProcessEngine(engine, choice, draw_seed=draw_seed, progress=lambda stage, fraction: None)
