"""Memory report of a scheduler core: paged use and what contiguous allocation would need (`block_manager`)."""

from collections.abc import Sequence
from functools import reduce
from operator import add

from block_manager import contiguous
from block_manager.contiguous import ContiguousDemand, ContiguousRequest
from block_manager.memory_report import HeldSequence, MemoryReport, PagedMemory, paged_memory
from scheduler_svc.core.request import Group, QueueKind
from scheduler_svc.core.state import CoreState


def memory_report(states: Sequence[CoreState]) -> MemoryReport:
    """Current device memory use of all worker groups, compared with contiguous allocation in a memory of the same size.

    The final length of live sequences is unknown, so contiguous `reserved` is all room up to prompt +
    max_tokens (at most max_model_len) and `internal` only the rounding. Swapped groups wait there as they do
    here.
    """
    requests = states[0].requests.values()
    groups = [group for request in requests for group in request.groups if not group.is_finished]
    tenants = [_tenant(states[group.worker], group) for group in groups if group.place is QueueKind.RUNNING]
    waiting = [_demand(states[group.worker], group) for group in groups if group.place is not QueueKind.RUNNING]
    ledgers = [state.cache.ledger for state in states]
    num_slots = sum(ledger.gpu.num_usable * ledger.block_size // ledger.num_groups for ledger in ledgers)
    return MemoryReport(paged(states), contiguous.place(tenants, waiting, num_slots))


def paged(states: Sequence[CoreState]) -> PagedMemory:
    """Paged use only, from the device block tables."""
    return reduce(add, map(_paged, states))


def _paged(state: CoreState) -> PagedMemory:
    ledger = state.cache.ledger
    held = [
        HeldSequence(ledger.tables[sequence.name], sequence.num_tokens + sequence.num_placeholders)
        for request in state.requests.values()
        for sequence in request.unfinished
        if sequence.name in ledger.tables
    ]
    return paged_memory(
        held,
        ledger.block_size,
        placeholders=ledger.gpu.reserved,
        num_groups=ledger.num_groups,
        num_state_blocks=ledger.num_state_blocks,
    )


def _demand(state: CoreState, group: Group) -> ContiguousDemand:
    request = group.request
    longest = len(request.prompt_token_ids) + request.stop.max_tokens
    return ContiguousDemand(group.max_num_running_seqs, min(longest, state.limits.max_model_len))


def _tenant(state: CoreState, group: Group) -> ContiguousRequest:
    ledger, demand = state.cache.ledger, _demand(state, group)
    held = tuple(min(s.num_tokens + s.num_placeholders, ledger.room(s.name), demand.max_length) for s in group.live)
    return ContiguousRequest(demand, held, demand.max_length)
