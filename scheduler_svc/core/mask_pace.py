"""The pace of groups whose grammar masks take long: they sit out steps, so that those masks take a small share of others' time.

A group owes the seconds that its masks held steps up, beyond what masks usually take (the worker leaves
that out). Each step pays off MASK_SHARE of its duration, in equal parts, and a group that owes is not
scheduled beside groups that owe nothing. So n streams with costly grammars leave others 1 - MASK_SHARE of
their speed, whatever one mask costs. Where all running groups owe, those that owe about the least run
together. Only when a sequence is scheduled changes, never its tokens.
"""

from collections.abc import Sequence

from scheduler_svc.core.policies.mixed.fast_decode.rows import SteadyRows
from scheduler_svc.core.request import Group, Place

MASK_SHARE = 0.1
_AS_MUCH = 2.0
"""So many times the least debt still counts as about as much."""
_MOST_EMPTY_PLANS = 4


class MaskPace:
    """Owner of the list of groups that owe; what they owe and whether they sit out is in `Group`."""

    def __init__(self) -> None:
        self._owing: list[Group] = []
        self._num_empty = 0

    def charge(self, group: Group, seconds: float) -> None:
        """Its masks held a step up."""
        if group not in self._owing:
            self._owing.append(group)
        group.mask_debt_s += seconds

    def pay(self, duration_s: float) -> None:
        """A step came back after so many seconds."""
        owing = [group for group in self._owing if group.place is Place.RUNNING]
        for group in owing:
            group.mask_debt_s = max(0.0, group.mask_debt_s - MASK_SHARE * duration_s / len(owing))

    def on_plan(self, *, is_empty: bool) -> bool:
        """Whether groups that sit out are why nothing is scheduled. After a few such plans their debts are forgiven."""
        self._num_empty = self._num_empty + 1 if is_empty else 0
        if not is_empty or not any(group.is_paused for group in self._owing):
            return False
        if self._num_empty >= _MOST_EMPTY_PLANS:
            for group in self._owing:
                group.mask_debt_s = 0.0
        return True

    def begin_plan(self, running: Sequence[Group], steady: SteadyRows) -> None:
        """Decide which groups sit out the next plan."""
        if not self._owing:
            return
        for group in self._owing:
            group.is_paused = False
        self._owing = [group for group in self._owing if group.mask_debt_s > 0 and not group.is_finished]
        owing = [group for group in self._owing if group.place is Place.RUNNING]
        least = min(group.mask_debt_s for group in owing) if owing and len(owing) == len(running) else 0.0
        for group in owing:
            group.is_paused = group.mask_debt_s > _AS_MUCH * least
            group.mask_debt_s -= least
            if group.is_paused:
                steady.leave(group)
