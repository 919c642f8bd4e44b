"""`LLM`: generation in this process or behind a gateway, with vLLM's interface.

    from quire import LLM, SamplingParams

    llm = LLM(model="models/tiny")
    for output in llm.generate(["The future of AI is"], SamplingParams(temperature=0.8, top_p=0.95)):
        print(output.outputs[0].text)

Contains the prompt forms, input order and progress bar. Not here: the loop itself (`in_process`, `remote`).
"""

import random
import secrets
import sys
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from quire import extras
from quire.client.chat_messages import ChatOptions, Message
from quire.client.conversations import Conversation, conversation_list
from quire.client.messages import Prompt, RequestOptions
from quire.client.outputs import EmbeddingOutput, EmbeddingRequestOutput, RequestOutput
from quire.client.prompts import AnyPrompt, plain_prompt, prompt_list
from quire.client.sampling_params import AnyParams, BeamSearchParams, PoolingParams, SamplingParams
from quire.client.value_checks import is_listing, valid_request_id
from quire.offline import llm_settings
from svc_common.errors import FailedPrecondition, InvalidArgument

_NO_CHAT = ChatOptions()


class Backend(Protocol):
    """Where requests run."""

    def add(self, request_id: str, prompt: Prompt | Conversation, params: AnyParams, options: RequestOptions) -> None:
        """Queue a request for tokens or a vector; raises if it is refused."""

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests; unknown ids are ignored."""

    def discard(self, request_ids: Iterable[str]) -> None:
        """End requests without reporting them from `step`; unknown ids are ignored."""

    def has_unfinished(self) -> bool:
        """True if `step` has anything to do."""

    def step(self) -> list[RequestOutput]:
        """Requests with new output."""

    def steps(self, *, tables: bool) -> list[dict[str, Any]]:
        """The last steps, in the format of `quire steps --json`; FailedPrecondition if they are not kept."""

    def close(self) -> None:
        """End all requests."""


class LLM:
    """A model to generate with. Context manager; `close()` ends all requests, memory is freed with the object.

    LLM(model="path/to/checkpoint", ...)  loads it into this process; `model` None = the built-in one.
    LLM(target="127.0.0.1:50051")         uses a running gateway; `model` may name one of those it serves.

    The other arguments are vLLM's and apply in process only; None = the default of `quire serve worker` / `quire serve scheduler`.
    `policy`: a preset's name or a policy file; `policy_set`: keys on top of it, as ["preemption_mode=swap"] or
    {"preemption_mode": "swap"} (docs/policies.md). `kv_cache_memory`: bytes or "512MiB"; `swap_space`: GiB or "512MiB".
    `adapters`: folders of LoRA adapters by name, which calls give as `adapter` (docs/adapters.md).
    `log_steps`: keep the last 10,000 steps, for `steps`.
    `seed`: source of the seeds of requests without one; None = the system's randomness. Raises ConfigError, with the remedy, if
    model, memory or arguments are wrong.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        target: str | None = None,
        seed: int | None = None,
        policy: str | None = None,
        policy_set: Sequence[str] | Mapping[str, Any] | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        enable_prefix_caching: bool | None = None,
        kv_cache_memory: int | str | None = None,
        swap_space: float | str | None = None,
        adapters: Mapping[str, str | Path] | None = None,
        log_steps: bool = False,
        **worker_settings: Any,
    ) -> None:
        llm_settings.refuse_unknown(worker_settings)
        draw_seed = _seed_source(seed)
        memory = {"kv_cache_memory": kv_cache_memory, "swap_space": swap_space}
        scheduling = {
            "policy": policy,
            "policy_set": llm_settings.policy_values(policy_set),
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_batched_tokens,
            "enable_prefix_caching": enable_prefix_caching,
        }
        if target is not None:
            ours = {"adapters": adapters, "log_steps": log_steps or None}
            llm_settings.refuse_with_target(scheduling | memory | worker_settings | ours)
            self._backend = _remote(target, draw_seed, str(model or ""))
        else:
            worker_settings |= llm_settings.memory_values(kv_cache_memory, swap_space)
            folders = llm_settings.adapter_folders(adapters)
            self._backend = _in_process(model, scheduling, worker_settings, folders, draw_seed, log_steps=log_steps)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End all requests, and close the connection if there is one."""
        self._backend.close()

    # --- all at once -----------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: AnyPrompt | Sequence[AnyPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: str | Sequence[str] = "",
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete the prompts; returns their outputs in the order of the prompts.

        prompts: one or many of: text, token ids, {"prompt": text}, {"prompt_token_ids": ids}.
        sampling_params: for all, or one per prompt; None = `SamplingParams()`, which ends after 16 tokens, as in vLLM.
        adapter: name of a loaded adapter, for all or one per prompt; empty = the model alone.
        use_tqdm: vLLM's name; shows a progress bar if standard error is a terminal.
        Raises the error of the first prompt that is refused or fails, and ends the others. Raises FailedPrecondition while
        requests of `add_request` run: this call would swallow their outputs.
        """
        many = prompt_list(prompts)
        return self._run(many, _params_list(sampling_params, len(many)), adapter, use_tqdm=use_tqdm)

    def chat(
        self,
        messages: str | Sequence[Message] | Sequence[Sequence[Message] | str],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat: ChatOptions = _NO_CHAT,
        adapter: str | Sequence[str] = "",
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one or many conversations, each [{"role": "user", "content": "..."}, ...], with the model's chat template.

        `chat`: tools and other chat options, for all of them. Outputs have `reasoning` and `tool_calls` beside their text.
        See `generate` for the rest.
        """
        many = conversation_list(messages, chat)
        return self._run(many, _params_list(sampling_params, len(many)), adapter, use_tqdm=use_tqdm)

    def beam_search(
        self,
        prompts: AnyPrompt | Sequence[AnyPrompt],
        params: BeamSearchParams,
        *,
        adapter: str | Sequence[str] = "",
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete the prompts by beam search: `beam_width` outputs each, best first, with their `score`. See `generate`."""
        if not isinstance(params, BeamSearchParams):
            raise InvalidArgument.field("params", f"must be BeamSearchParams, not {type(params).__name__}")
        return self.generate(prompts, params.sampling_params(), adapter=adapter, use_tqdm=use_tqdm)

    def embed(
        self,
        prompts: AnyPrompt | Sequence[AnyPrompt],
        pooling_params: PoolingParams | None = None,
        *,
        adapter: str | Sequence[str] = "",
        use_tqdm: bool = True,
    ) -> list[EmbeddingRequestOutput]:
        """Vectors of the prompts, in the order of the prompts. See `generate`."""
        if not isinstance(pooling_params, PoolingParams | None):
            raise InvalidArgument.field("pooling_params", f"must be PoolingParams, not {type(pooling_params).__name__}")
        many = prompt_list(prompts)
        params: list[AnyParams] = [pooling_params or PoolingParams()] * len(many)
        return [_embedding(output) for output in self._run(many, params, adapter, use_tqdm=use_tqdm)]

    def _run(
        self,
        prompts: Sequence[Prompt | Conversation],
        params: Sequence[AnyParams],
        adapter: str | Sequence[str],
        *,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        if self._backend.has_unfinished():
            raise FailedPrecondition("requests of add_request are running; step until they are finished first")
        prefix = f"llm-{uuid.uuid4().hex[:12]}"
        ids = [f"{prefix}-{i}" for i in range(len(prompts))]
        adapters = _adapter_list(adapter, len(prompts))
        try:
            for request_id, prompt, one, name in zip(ids, prompts, params, adapters, strict=True):
                self._backend.add(request_id, prompt, one, RequestOptions(model=name))
            return self._run_to_end(ids, use_tqdm=use_tqdm)
        except BaseException:
            self._backend.discard(ids)
            raise

    def _run_to_end(self, ids: list[str], *, use_tqdm: bool) -> list[RequestOutput]:
        done: dict[str, RequestOutput] = {}
        with _progress_bar(shown=use_tqdm) as bar:
            task = bar.add_task("prompts", total=len(ids))
            wanted = set(ids)
            while len(done) < len(ids):
                for output in self._backend.step():
                    if output.error is not None and output.request_id in wanted:
                        raise output.error
                    if output.finished and output.request_id in wanted:
                        done[output.request_id] = output
                        bar.advance(task)
        return [done[request_id] for request_id in ids]

    # --- step by step ----------------------------------------------------------------------------------------------

    def add_request(
        self,
        request_id: str,
        prompt: AnyPrompt,
        sampling_params: AnyParams | None = None,
        *,
        priority: int = 0,
        adapter: str = "",
    ) -> None:
        """Queue a request; `step` returns its outputs (for PoolingParams its `embedding`). `priority`: higher = sooner.

        Raises InvalidArgument for an id that is empty or not text, and for invalid prompts and parameters.
        """
        if not valid_request_id(request_id):
            raise InvalidArgument.field("request_id", "is empty; outputs could not be told apart by it")
        params = sampling_params if isinstance(sampling_params, PoolingParams) else _one_params(sampling_params)
        self._backend.add(request_id, plain_prompt(prompt), params, RequestOptions(model=adapter, priority=priority))

    def step(self) -> list[RequestOutput]:
        """Run one step in process, or wait for output behind a gateway; returns the requests with new output.

        Outputs are cumulative and grow until `finished`; a failed request has `error` and no finish reason.
        """
        return self._backend.step()

    def steps(self, *, tables: bool = False) -> list[dict[str, Any]]:
        """The last steps, oldest first, in the format of `quire steps --json`; `tables` adds block tables, as its `--tables`.

        Raises FailedPrecondition without `log_steps`, and behind a gateway.
        """
        return self._backend.steps(tables=tables)

    def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests; unknown and finished ids are ignored. `step` returns them once more, with finish reason "abort"."""
        self._backend.abort([request_id] if isinstance(request_id, str) else request_id)

    def has_unfinished_requests(self) -> bool:
        """True if `step` has anything to do."""
        return self._backend.has_unfinished()


# --- building --------------------------------------------------------------------------------------------------------


def _seed_source(seed: int | None) -> Callable[[], int]:
    if seed is None:
        return lambda: secrets.randbits(64)
    generator = random.Random(seed)
    return lambda: generator.getrandbits(64)


def _in_process(
    model: str | Path | None,
    scheduling: Mapping[str, Any],
    worker_settings: Mapping[str, Any],
    adapters: Mapping[str, str],
    draw_seed: Callable[[], int],
    *,
    log_steps: bool,
) -> Backend:
    extras.require("LLM in process", *extras.services())
    # Imports torch, so only when a model runs in this process.
    from quire.offline import in_process  # noqa: PLC0415

    return in_process.load(model, scheduling, worker_settings, adapters, draw_seed, log_steps=log_steps)


def _remote(target: str, draw_seed: Callable[[], int], model: str) -> Backend:
    # Imports the gRPC client, so only when a gateway is used.
    from quire.offline import remote  # noqa: PLC0415

    return remote.RemoteEngine(target, draw_seed=draw_seed, model=model)


# --- parameters ------------------------------------------------------------------------------------------------------


def _params_list(params: SamplingParams | Sequence[SamplingParams] | None, n: int) -> list[SamplingParams]:
    if not is_listing(params):
        return [_one_params(params)] * n  # type: ignore[arg-type]
    many = list(params)  # type: ignore[arg-type]
    if len(many) != n:
        raise InvalidArgument.field("sampling_params", f"has {len(many)} entries for {n} prompts")
    return [_one_params(one) for one in many]


def _one_params(params: SamplingParams | None) -> SamplingParams:
    if not isinstance(params, SamplingParams | None):
        raise InvalidArgument.field("sampling_params", f"must be SamplingParams, not {type(params).__name__}")
    return SamplingParams() if params is None else params


def _adapter_list(adapter: str | Sequence[str], n: int) -> list[str]:
    names = [adapter] * n if isinstance(adapter, str) else list(adapter)
    if len(names) != n or not all(isinstance(name, str) for name in names):
        raise InvalidArgument.field("adapter", f"must be a name, or {n} of them, one per prompt")
    return names


def _embedding(output: RequestOutput) -> EmbeddingRequestOutput:
    vector = EmbeddingOutput(output.embedding or [])
    return EmbeddingRequestOutput(output.request_id, vector, output.prompt_token_ids, output.num_prompt_tokens)


def _progress_bar(*, shown: bool) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        disable=not (shown and sys.stderr.isatty()),
    )
