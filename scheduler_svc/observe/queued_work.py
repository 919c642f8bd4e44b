"""Estimate of the work that waits, in seconds: the signal on which autoscalers act."""

from scheduler_svc.core.parts.placement import prompt_tokens_left, token_s
from scheduler_svc.core.state import CoreState
from scheduler_svc.observe.recording.recorder import AnyCore

_UNKNOWN_OUTPUT = 64.0


def queued_work_s(core: AnyCore | None, num_waiting: int, num_waiting_tokens: int) -> float | None:
    """Estimated seconds for which all workers compute what waits; None while its cost is unknown.

    What waits: prompt tokens of waiting requests and of running ones that are not computed, at the measured cost of
    a token, and the expected output of waiting requests at the pace of the present batch. Cached prefixes, which
    only admission looks up, are counted as work, and tokens computed before a preemption are not.
    """
    states = [] if core is None else states_at_work(core)
    num_tokens = num_waiting_tokens + sum(map(prompt_tokens_left, states))
    if not (num_tokens or num_waiting):
        return 0.0
    if not states or not all(state.costs.now.step_s for state in states):
        return None
    output = num_waiting * (states[0].lengths.mean or _UNKNOWN_OUTPUT)
    return num_tokens / sum(1 / token_s(s) for s in states) + output / sum(map(_decoded_per_s, states))


def states_at_work(core: AnyCore) -> list[CoreState]:
    """The states of the workers that start requests, of all if none does. Rows in fast decode may lack their last counts."""
    states = [worker.state for worker in core.workers]
    return [state for state in states if state.takes_work] or states


def _decoded_per_s(state: CoreState) -> float:
    """Output tokens per second of a worker: each of its rows yields one in a step."""
    num_rows = max(1, state.num_running_seqs)
    return num_rows / (state.costs.now.step_s + num_rows * state.costs.now.compute_token_s)
