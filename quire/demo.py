"""`python -m quire.demo`: run the services with the built-in model, one request of each kind, and show its trace.

The demo checks what it shows: exit status 1 if a stream is empty, if the request's trace lacks a service,
or if a process is left running. It uses free ports, so several demos can run at the same time.
"""

import json
import os
import sys
import urllib.request
from collections.abc import Callable

from rich.console import Console
from rich.tree import Tree

from quire.client.sampling_params import SamplingParams
from quire.client.sync_client import Client
from quire.local_stack.otlp_receiver import OtlpReceiver, ReceivedSpan, ReceivedTrace
from quire.local_stack.stack import LocalStack
from svc_common.errors import QuireError

SERVICES = ("quire-gateway", "quire-scheduler", "quire-worker")
STAGES = ("scheduler.queue", "scheduler.prefill", "scheduler.decode", "worker.sequence")
PROMPT = "def fibonacci(n):"
QUESTION = "How do I read a file line by line?"
MAX_TOKENS = 48
SEED = 7
TRACE_TIMEOUT_S = 15.0
HTTP_TIMEOUT_S = 60.0


class DemoFailedError(Exception):
    """A check of the demo failed; the message says which."""


def _require(condition: object, what: str) -> None:
    if not condition:
        raise DemoFailedError(what)


def main() -> None:
    """Run the demo; exit status 0 if every check held."""
    console = Console(highlight=False)
    try:
        with OtlpReceiver() as receiver:
            _run(console, receiver)
    except (DemoFailedError, QuireError, OSError) as error:
        Console(stderr=True).print(f"demo failed: {error}", style="bold red", highlight=False)
        sys.exit(1)
    console.print("\nEverything is stopped; nothing is left running.")


def _run(console: Console, receiver: OtlpReceiver) -> None:
    console.rule("Starting gateway, scheduler and worker with models/tiny")
    stack = LocalStack(
        environ={**os.environ, **receiver.environ()},
        on_service=lambda s: console.print(f"service {s.name} pid={s.pid} address={s.address}"),
    )
    with stack:
        pids = stack.pids
        console.print(f"ready grpc={stack.grpc_address} http={stack.http_url} admin={stack.admin_address}")
        trace_id = _complete_over_grpc(console, stack)
        _chat_over_http(console, stack)
        trace = _wait_for_trace(receiver, trace_id)
        _show_trace(console, trace)
    for name, pid in pids.items():
        _require(not _is_running(pid), f"the {name} (pid {pid}) is still running")


def _complete_over_grpc(console: Console, stack: LocalStack) -> str:
    """Stream a completion; returns its trace id."""
    console.rule("A completion, streamed over gRPC")
    params = SamplingParams(temperature=0.8, top_p=0.95, seed=SEED, max_tokens=MAX_TOKENS)
    with Client(stack.grpc_address) as client:
        stream = client.generate_stream(PROMPT, params)
        console.print(PROMPT, end="", style="bold", markup=False)
        for delta in stream:
            console.print(delta.text, end="", markup=False, soft_wrap=True)
        console.print()
        output = stream.result
        _require(output.finished and output.text, "the completion is empty")
        console.print(
            f"\n{output.num_prompt_tokens} prompt tokens, {len(output.outputs[0].token_ids)} generated, "
            f"seed {output.seed}, request {output.request_id}"
        )
        return stream.trace_id


def _chat_over_http(console: Console, stack: LocalStack) -> None:
    """Send a chat to the same server through the OpenAI API, streaming by SSE."""
    console.rule("A chat over the OpenAI API")
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": MAX_TOKENS,
        "seed": SEED,
        "temperature": 0.8,
    }
    request = urllib.request.Request(
        f"{stack.http_url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=HTTP_TIMEOUT_S) as answer:
        choice = json.load(answer)["choices"][0]
    console.print(f"user: {QUESTION}", style="bold", markup=False)
    console.print(f"assistant: {choice['message']['content']}", markup=False, soft_wrap=True)
    _require(choice["finish_reason"] in {"stop", "length"}, f"the chat ended by {choice['finish_reason']}")


# --- the trace -------------------------------------------------------------------------------------------------------


def _wait_for_trace(receiver: OtlpReceiver, trace_id: str) -> ReceivedTrace:
    _require(trace_id, "the gateway named no trace for the request")
    try:
        receiver.wait(_all_stages(trace_id), timeout_s=TRACE_TIMEOUT_S)
    except TimeoutError as error:
        raise DemoFailedError(f"the trace {trace_id} is incomplete: {error}") from None
    trace = receiver.traces()[trace_id]
    _require(set(trace.services) == set(SERVICES), f"the trace has spans of {', '.join(trace.services)} only")
    _require(len(trace.roots) == 1, f"the trace has {len(trace.roots)} roots: spans of it were lost")
    return trace


def _all_stages(trace_id: str) -> Callable[[list[ReceivedSpan]], bool]:
    """Predicate: the span of every stage has been received, and no parent is missing (the root span ends last).

    A service sends a span up to 0.2 s after its end, so the last stage can be the last to be received.
    """

    def complete(spans: list[ReceivedSpan]) -> bool:
        mine = [span for span in spans if span.trace_id == trace_id]
        known = {span.span_id for span in mine}
        return {span.name for span in mine}.issuperset(STAGES) and all(
            span.parent_id in known for span in mine if span.parent_id
        )

    return complete


def _show_trace(console: Console, trace: ReceivedTrace) -> None:
    console.rule("The trace of the completion: one id over three services")
    tree = Tree(f"trace {trace.trace_id}  ({', '.join(trace.services)})")
    start_ns = trace.roots[0].start_ns
    for root in trace.roots:
        _grow(tree, trace, root, start_ns)
    console.print(tree)


def _grow(branch: Tree, trace: ReceivedTrace, span: ReceivedSpan, start_ns: int) -> None:
    begin_ms = (span.start_ns - start_ns) / 1e6
    label = f"{span.service}  [bold]{span.name}[/bold]  {1e3 * span.duration_s:.1f} ms  (from {begin_ms:.1f} ms)"
    twig = branch.add(label)
    for child in trace.children(span.span_id):
        _grow(twig, trace, child, start_ns)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


if __name__ == "__main__":
    main()
