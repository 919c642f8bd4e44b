"""Limit the share of time that slow grammar masks take from others: their groups sit out steps.

A group owes the seconds by which its masks delayed steps, beyond what masks usually take (the worker subtracts
that). Each step pays off MASK_SHARE of its duration, in equal parts, and a group with debt is not scheduled
beside groups without. So n streams with costly grammars leave others 1 - MASK_SHARE of their speed, whatever
one mask costs. Where all running groups have debt, those with about the least run together. Only when a
sequence is scheduled changes, never its tokens.
"""

from collections.abc import Sequence

from scheduler_svc.core.fast_decode.rows import FastRows
from scheduler_svc.core.request import Group, QueueKind

MASK_SHARE = 0.1
_AS_MUCH = 2.0
"""Up to this multiple of the least debt, a debt counts as about the least."""
_MOST_EMPTY_PLANS = 4


class SlowMasks:
    """Owner of the list of groups with debt; the debts and pause flags are fields of `Group`."""

    def __init__(self) -> None:
        self._owing: list[Group] = []
        self._num_empty = 0

    def charge(self, group: Group, seconds: float) -> None:
        """Add mask time to a group's debt."""
        if group not in self._owing:
            self._owing.append(group)
        group.mask_debt_s += seconds

    def pay(self, duration_s: float) -> None:
        """Pay off debts after a step of that duration."""
        if not self._owing:
            return
        owing = [group for group in self._owing if group.place is QueueKind.RUNNING]
        for group in owing:
            group.mask_debt_s = max(0.0, group.mask_debt_s - MASK_SHARE * duration_s / len(owing))

    def on_plan(self, *, is_empty: bool) -> bool:
        """True if nothing was scheduled because groups sit out. After a few such plans their debts are cleared."""
        self._num_empty = self._num_empty + 1 if is_empty else 0
        if not is_empty or not any(group.is_paused for group in self._owing):
            return False
        if self._num_empty >= _MOST_EMPTY_PLANS:
            for group in self._owing:
                group.mask_debt_s = 0.0
        return True

    def begin_plan(self, worker: int, running: Sequence[Group], fast_rows: FastRows) -> None:
        """Decide which groups sit out the next plan of that worker group. Groups that moved to another one are dropped."""
        if not self._owing:
            return
        ours = [group for group in self._owing if group.worker == worker]
        for group in ours:
            group.is_paused = False
        self._owing = [group for group in ours if group.mask_debt_s > 0 and not group.is_finished]
        owing = [group for group in self._owing if group.place is QueueKind.RUNNING]
        least = min(group.mask_debt_s for group in owing) if owing and len(owing) == len(running) else 0.0
        for group in owing:
            group.is_paused = group.mask_debt_s > _AS_MUCH * least
            group.mask_debt_s -= least
            if group.is_paused:
                fast_rows.leave(group)
