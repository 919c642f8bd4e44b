"""One request through a stack without torch: it is served (P5), and it is one trace over three services (R12).

torch is made unimportable in all three processes; the worker is the simulated one.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

from quire import SamplingParams
from quire.client.outputs import RequestOutput
from quire.client.sync_client import Client
from quire.local_stack.otlp_receiver import OtlpReceiver
from quire.local_stack.stack import LocalStack
from tests.support.tracing_page import undocumented

_NEEDED = {"scheduler.queue", "scheduler.prefill", "scheduler.decode", "worker.sequence"}
_SECRET = "canary-7f3a"
_BLOCKER = '''
import sys

class _Absent:
    """Answers for torch and transformers as if they were not installed."""
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch", "transformers", "safetensors"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None

sys.meta_path.insert(0, _Absent())
'''


@dataclass(frozen=True, slots=True)
class Served:
    """A request's output, its trace, that of its client, and whatever the services exported."""

    output: RequestOutput
    trace_id: str
    client_trace_id: str
    receiver: OtlpReceiver


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One request from start to end of a stack."""
    blocker = tmp_path_factory.mktemp("blocker")
    (blocker / "sitecustomize.py").write_text(_BLOCKER)
    path = os.pathsep.join([str(blocker), *filter(None, [os.environ.get("PYTHONPATH")])])
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    tracer = TracerProvider().get_tracer("client")
    with OtlpReceiver() as receiver:
        environ = {**os.environ, **receiver.environ(), "PYTHONPATH": path}
        with (
            LocalStack(simulated=True, environ=environ) as stack,
            Client(stack.grpc_address) as client,
            tracer.start_as_current_span("client") as span,
        ):
            stream = client.generate_stream(f"def {_SECRET}", params)
            output = stream.read()
            mine = trace.format_trace_id(span.get_span_context().trace_id)
        yield Served(output, stream.trace_id, mine, receiver)


def test_the_stack_serves_without_torch(served: Served) -> None:
    """All three processes have the blocker; a completion comes back."""
    assert len(served.output.outputs[0].token_ids) == 6


def test_the_clients_trace_runs_through_gateway_scheduler_and_worker(served: Served) -> None:
    """W3C context from the client; queue, prefill, decode and sequence spans; step spans that link; no orphan, no content."""
    mine, found = served.client_trace_id, served.receiver.spans()
    assert served.trace_id == mine
    spans = [s for s in found if s.trace_id == mine]
    assert {s.service for s in spans} == {"quire-gateway", "quire-scheduler", "quire-worker"}
    assert {s.name for s in spans} >= _NEEDED
    ids = {s.span_id for s in spans}
    outside = [s for s in spans if s.parent_id not in ids]
    assert [s.service for s in outside] == ["quire-gateway"], "one root, the rest below it"
    step_spans = [s for s in found if s.name == "worker.step"]
    assert any(link.trace_id == mine for s in step_spans for link in s.links)
    assert all(s.trace_id != mine for s in step_spans), "steps have traces of their own"
    text = repr([(s.name, dict(s.attributes), s.events) for s in found])
    assert _SECRET not in text
    assert undocumented(found) == []
