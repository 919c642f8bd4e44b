"""Health of a gateway and its cells, in OpenEngine's states."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from gateway_svc.calls import Call
from gateway_svc.cell.cell import Cell
from gateway_svc.generating.generator import Generator
from protos.inference.v1 import inference_pb2
from protos.routers.v1 import openengine_pb2 as pb
from svc_common.clock import NS_PER_S, monotonic_ns
from svc_common.errors import Aborted, DeadlineExceeded, FailedPrecondition, Internal, ResourceExhausted, Unavailable

PROBE_S = 30.0
"""Longest time for which a probe waits for its token."""

_BEST_FIRST = (
    pb.HEALTH_STATE_READY,
    pb.HEALTH_STATE_DEGRADED,
    pb.HEALTH_STATE_STARTING,
    pb.HEALTH_STATE_NOT_READY,
    pb.HEALTH_STATE_DRAINING,
)
_FAILURES = (Aborted, DeadlineExceeded, FailedPrecondition, Internal, Unavailable)
_OTHER_ROLES = (pb.ENGINE_ROLE_PREFILL, pb.ENGINE_ROLE_DECODE)


def response_of(checks: Sequence[pb.HealthCheck]) -> pb.HealthResponse:
    """The worst state of the checks."""
    return pb.HealthResponse(state=max((check.state for check in checks), key=_BEST_FIRST.index), checks=checks)


def state_checks(cells: Sequence[Cell], *, is_stopping: bool) -> list[pb.HealthCheck]:
    """Checks of what the gateway knows already: itself, its schedulers, their models."""
    stopping = "this gateway is stopping" if is_stopping else ""
    own = pb.HEALTH_STATE_DRAINING if is_stopping else pb.HEALTH_STATE_READY
    return [
        pb.HealthCheck(name="grpc", state=own, message=stopping),
        _check_cells("scheduler", cells, lambda cell: cell.link.state.attached and cell.link.state.serving),
        _check_cells("model", cells, lambda cell: cell.model.current is not None),
    ]


def role_checks(role: int) -> list[pb.HealthCheck]:
    """A check of the expected role, if there is one that this release knows."""
    if role == pb.ENGINE_ROLE_AGGREGATED:
        return [pb.HealthCheck(name="role", state=pb.HEALTH_STATE_READY)]
    if role not in _OTHER_ROLES:
        return []
    message = "a cell does both prefill and decode; its role is AGGREGATED"
    return [pb.HealthCheck(name="role", state=pb.HEALTH_STATE_NOT_READY, message=message)]


async def inference_check(generator: Generator, call: Call, model: str) -> pb.HealthCheck:
    """Generate one token, as a request of the caller. Raises what is the caller's fault, such as NotFound."""
    deadline_ns = min(call.deadline_ns, monotonic_ns() + int(PROBE_S * NS_PER_S))
    probe = inference_pb2.GenerateRequest(model=model, text="a", cache=inference_pb2.CacheOptions(no_reuse=True))
    probe.stop.max_tokens = 1
    state, message = pb.HEALTH_STATE_READY, ""
    try:
        async with generator.generate(replace(call, deadline_ns=deadline_ns, idempotent=False), probe) as generation:
            async for _ in generation:
                pass
    except ResourceExhausted as error:
        state, message = pb.HEALTH_STATE_DEGRADED, str(error)
    except _FAILURES as error:
        state, message = pb.HEALTH_STATE_NOT_READY, str(error)
    return pb.HealthCheck(name="inference_probe", state=state, message=message)


def _check_cells(name: str, cells: Sequence[Cell], is_good: Callable[[Cell], object]) -> pb.HealthCheck:
    """READY if all are good, DEGRADED if some are. A cell without its first model is STARTING."""
    bad = [cell for cell in cells if not is_good(cell)]
    if not bad:
        return pb.HealthCheck(name=name, state=pb.HEALTH_STATE_READY)
    message = "; ".join(cell.not_ready_because for cell in bad)
    if any(is_good(cell) for cell in cells):
        return pb.HealthCheck(name=name, state=pb.HEALTH_STATE_DEGRADED, message=message)
    is_new = all(cell.model.current is None for cell in bad)
    state = pb.HEALTH_STATE_STARTING if is_new else pb.HEALTH_STATE_NOT_READY
    return pb.HealthCheck(name=name, state=state, message=message)
