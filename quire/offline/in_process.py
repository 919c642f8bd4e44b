"""The engine in this process: scheduler core, row planner and model engine in one loop, without RPC.

`step()` drives the classes that the services run: schedule, encode, execute, decode, update, detokenize.
Not here: prompt forms and the loop to completion (quire.offline.llm), the engine behind a gateway
(quire.offline.remote).
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from gateway_svc.chat.resolving import resolve_chat
from gateway_svc.chat.tool_calls.format_choice import FormatChoice
from gateway_svc.checks import validation
from gateway_svc.generating.choice_events import ChoiceEvents
from gateway_svc.text.text_model import TextModel
from gateway_svc.text.text_stream import TextStream
from protos.common.v1 import common_pb2
from protos.worker.v1 import worker_pb2
from quire.built_in_model import default_model
from quire.client import messages
from quire.client.conversations import Conversation
from quire.client.messages import Prompt, RequestOptions
from quire.client.outputs import RequestOutput
from quire.client.sampling_params import AnyParams, PoolingParams, SamplingParams
from quire.offline.in_process_adapters import InProcessAdapters
from quire.offline.in_process_request import InProcessRequest
from quire.offline.in_process_requests import InProcessRequests
from quire.offline.llm_settings import named_as_in_python
from quire.operators.admin import step_json
from quire.scheduling import scheduler_settings
from scheduler_svc.loop.settling import StepSettling
from scheduler_svc.observe.step_log import StepLog, StepReader
from scheduler_svc.observe.step_notifier import StepNotifier
from scheduler_svc.observe.step_record import StepOrigin
from scheduler_svc.policy.assembly import policy_of
from scheduler_svc.policy.choice import PolicyChoice, WorkerSize
from scheduler_svc.requests.submission import parse, to_core
from scheduler_svc.worker_values import RowSampling, WorkerResult
from scheduler_svc.workers.row_planner import RowPlanner
from svc_common.clock import NS_PER_S, monotonic_ns
from svc_common.errors import AlreadyExists, FailedPrecondition, Internal, QuireError
from svc_common.net import rpc
from worker_svc.engine import Engine, Progress
from worker_svc.executor.model_engine import ModelEngine
from worker_svc.settings import WorkerSettings

MAX_STEPS = 10_000


class KeptSteps:
    """The last MAX_STEPS steps, as `quire steps --json` writes them; none unless `is_on`. `observers`: those that keep them."""

    def __init__(self, *, is_on: bool) -> None:
        self.observers = [StepLog(MAX_STEPS)] if is_on else []

    def as_json(self, *, tables: bool) -> list[dict[str, Any]]:
        """The steps kept, oldest first. Raises FailedPrecondition if steps are not kept."""
        if not self.observers:
            raise FailedPrecondition("the steps are not kept: start it as LLM(log_steps=True)", reason="STEPS_NOT_KEPT")
        [log] = self.observers
        return [step_json(report, tables=tables) for report in StepReader(log, 0, tables=tables).new()]


class InProcessEngine:
    """Owns core, planner, engine and the live requests. Not thread-safe."""

    def __init__(
        self,
        engine: Engine,
        choice: PolicyChoice,
        adapters: Mapping[str, str],
        *,
        draw_seed: Callable[[], int],
        progress: Progress,
        log_steps: bool = False,
    ) -> None:
        """Load the model, profile and allocate memory, and load `adapters` (folders by name).

        Raises ConfigError, with the remedy, if model, memory or an adapter does not fit. `log_steps`: keep
        the last steps for `steps`.
        """
        self._engine = engine
        self._draw_seed = draw_seed
        self.limits: common_pb2.ModelLimits = engine.load(progress)
        self.limits.max_model_len = max_model_len = choice.max_model_len(self.limits.max_model_len)
        memory = self.memory = engine.profile(*choice.largest_step(max_model_len))
        size = WorkerSize.of(memory, self.limits)
        fit = choice.core_limits(size)
        engine.allocate(fit.num_gpu_blocks, fit.num_cpu_blocks)
        self._adapters = InProcessAdapters(self.limits.model, engine, adapters)
        self.text_model = TextModel.from_bundle(engine.bundle())
        self._defaults = validation.SamplingDefaults.from_generation_config(self.text_model.generation_config)
        self._core = choice.for_model(size).build(fit)
        self._planner = RowPlanner(fit.max_num_seqs)
        self._kept = KeptSteps(is_on=log_steps)
        self._live = InProcessRequests(self._core.stop_at)
        self._settling = StepSettling(self._live, StepNotifier(self._kept.observers, policy=self._core.spec.name))

    # --- requests ------------------------------------------------------------------------------------------------

    def add(self, request_id: str, prompt: Prompt | Conversation, params: AnyParams, options: RequestOptions) -> None:
        """Queue a request. Raises InvalidArgument, OutOfRange or AlreadyExists if it is refused."""
        if request_id in self._live:
            raise AlreadyExists(f"request {request_id} is running already", reason="DUPLICATE_REQUEST")
        resolved = self._resolved(prompt, params, options)
        submit = resolved.submit(request_id, self._adapters.named(options.model))
        submission = parse(submit, monotonic_ns())
        adapter_id = self._adapters.id_of(submission.adapter)
        request = to_core(submission, request_id, submission.new_output(), self.limits, adapter_id)
        self._core.add(request)
        choices = [
            ChoiceEvents(i, self._text(resolved, i), with_logprobs=submission.sampling.logprobs)
            for i in range(submission.num_choices)
        ]
        live = InProcessRequest(
            submission,
            request,
            None if isinstance(prompt, Conversation) else prompt,
            choices,
            submission.adapter or self.limits.model,
            normalize=isinstance(params, PoolingParams) and params.normalize,
        )
        self._live.add(request_id, live)

    def _text(self, resolved: validation.ResolvedRequest, choice: int) -> TextStream:
        parser = None if resolved.parsing is None else resolved.parsing.parser(choice)
        return TextStream(
            self.text_model,
            resolved.stop_strings,
            min_tokens=resolved.stop.min_tokens,
            parser=parser,
            include_stop=resolved.include_stop,
            special_tokens=resolved.special_tokens,
        )

    def _resolved(
        self, prompt: Prompt | Conversation, params: AnyParams, options: RequestOptions
    ) -> validation.ResolvedRequest:
        if isinstance(params, SamplingParams):
            if isinstance(prompt, Conversation):
                return self._resolve_chat(prompt, params, options)
            return self.resolve(prompt, params, options)
        assert not isinstance(prompt, Conversation), "LLM.chat takes SamplingParams alone"
        return self._resolve_embed(prompt, params, options)

    def _resolve_chat(
        self, prompt: Conversation, params: SamplingParams, options: RequestOptions
    ) -> validation.ResolvedRequest:
        message = messages.chat_request(prompt.messages, params, options, prompt.chat)
        validation.check_parameters(message, self.limits)
        return resolve_chat(
            message, self.text_model, self.limits, self._defaults, FormatChoice(), draw_seed=self._draw_seed
        )

    def resolve(self, prompt: Prompt, params: SamplingParams, options: RequestOptions) -> validation.ResolvedRequest:
        """The request with all defaults applied, checked as a gateway checks it."""
        message = messages.generate_request(prompt, params, options)
        validation.check_parameters(message, self.limits)
        return validation.resolve(
            message, self._encoded(prompt), self.limits, self._defaults, self.text_model, draw_seed=self._draw_seed
        )

    def _resolve_embed(
        self, prompt: Prompt, params: PoolingParams, options: RequestOptions
    ) -> validation.ResolvedRequest:
        message = messages.embed_request([prompt], params, options)
        validation.check_embed(message, self.limits)
        return validation.resolve_embed(message, self._encoded(prompt), self.limits)

    def _encoded(self, prompt: Prompt) -> list[int]:
        return self.text_model.encode(prompt) if isinstance(prompt, str) else list(prompt)

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests and free their blocks at once. Unknown and finished ids are ignored."""
        wanted = [request_id for request_id in sorted(request_ids) if request_id in self._live]
        self._core.abort(wanted)
        for request_id in wanted:
            self._live.abort(request_id)

    def discard(self, request_ids: Iterable[str]) -> None:
        """End requests without reporting them from `step`."""
        gone = set(request_ids)
        self.abort(gone)
        self._live.forget(gone)

    def has_unfinished(self) -> bool:
        """True if `step` has anything to run or report."""
        return self._live.has_news

    def close(self) -> None:
        """End all requests and reset the engine."""
        self.abort(list(self._live))
        self._engine.reset()

    # --- steps ---------------------------------------------------------------------------------------------------

    def steps(self, *, tables: bool) -> list[dict[str, Any]]:
        """See Backend."""
        return self._kept.as_json(tables=tables)

    def step(self) -> list[RequestOutput]:
        """Run one step and return the requests with new output; finished ones for the last time."""
        began_ns = monotonic_ns()
        for plan in self._core.schedule(began_ns / NS_PER_S):
            self._live.step_error = None
            origin = StepOrigin(planned_ns=began_ns, schedule_ns=monotonic_ns() - began_ns)
            self._settling.announce(self._core, plan, origin)
            if plan.left or not plan.is_empty:
                self._settling.settle(self._core, plan, self._executed(self._planner.encode(plan, self._sampling)))
                self._live.deliver()
        return self._live.take_reported()

    def _sampling(self, request_id: str) -> RowSampling:
        live = self._live[request_id]
        return live.submission.row_sampling(self.limits, live.request.lora_id)

    def _executed(self, message: worker_pb2.SchedulerOutputs) -> WorkerResult:
        """The step's result. If it could not run, its requests end with `step_error`."""
        try:
            output = self._engine.execute(message)
        except QuireError as error:
            self._live.step_error = error
            output = worker_pb2.WorkerOutputs(error=rpc.to_error_status(error))
        output.step_id, output.epoch = message.step_id, message.epoch
        result = self._planner.decode(output)
        if result is None:
            raise Internal(f"the engine answered step {output.step_id}, which is not awaited")
        return result


# --- the composition root ----------------------------------------------------------------------------------------------


def load(
    model: str | Path | None,
    scheduling: Mapping[str, Any],
    worker_settings: Mapping[str, Any],
    adapters: Mapping[str, str],
    draw_seed: Callable[[], int],
    *,
    log_steps: bool,
) -> InProcessEngine:
    """Build an engine with the checkpoint `model` (None = the built-in one). `adapters`: folders by name.

    `scheduling` and `worker_settings` are fields of SchedulerSettings and WorkerSettings. Raises
    ConfigError, naming the options as in Python, for what cannot work; numbers are checked before anything
    is loaded.
    """
    choice = policy_of(scheduler_settings(str, **scheduling))
    with named_as_in_python():
        given = {**worker_settings, "model": model or default_model()}
        settings = WorkerSettings.of(**{name: value for name, value in given.items() if value is not None})
        engine = ModelEngine(settings)
        return InProcessEngine(
            engine,
            choice,
            adapters,
            draw_seed=draw_seed,
            progress=lambda stage, fraction: None,
            log_steps=log_steps,
        )
