"""Headers of endpoint pickers: tenant, priority and service goals of a request, where the operator trusts them.

Names are llm-d's, and the older ones of the Gateway API inference extension.
"""

import re
from collections.abc import Mapping, Sequence

from gateway_svc.access.tenant_callers import TENANT_HEADER
from gateway_svc.access.tenants_file import TENANT_NAME
from gateway_svc.calls import Caller, Callers, ServiceGoals
from svc_common.clipping import clip
from svc_common.clock import monotonic_ns
from svc_common.errors import InvalidArgument

FAIRNESS = ("x-llm-d-inference-fairness-id", "x-gateway-inference-fairness-id")
OBJECTIVE = ("x-llm-d-inference-objective", "x-gateway-inference-objective")
TTFT = ("x-llm-d-slo-ttft-ms", "x-slo-ttft-ms")
TPOT = ("x-llm-d-slo-tpot-ms", "x-slo-tpot-ms")

_MILLISECONDS = re.compile(r"\d{1,9}(\.\d{1,6})?", re.ASCII)


def read_goals(metadata: Mapping[str, str], priorities: Mapping[str, int]) -> ServiceGoals:
    """The goals in a call's headers. An objective that is not among `priorities` has 0, as at llm-d's picker.

    Raises InvalidArgument for a time that is no positive number.
    """
    objective = _first(metadata, OBJECTIVE)
    return ServiceGoals(
        priority=priorities.get(objective, 0) if objective else None,
        ttft_s=_seconds(metadata, TTFT),
        tpot_s=_seconds(metadata, TPOT),
        since_ns=monotonic_ns(),
    )


class FairnessCallers:
    """Callers with the fairness id of a call as their tenant, where it has one.

    With a tenants file the key must be allowed to name tenants (`x-tenant-id`) and the id be one of the file; without one
    every id is a tenant, with the terms of the default one.
    """

    def __init__(self, callers: Callers, *, has_file: bool) -> None:
        self._callers = callers
        self._has_file = has_file

    def of(self, metadata: Mapping[str, str]) -> Caller:
        """Identify the caller of a call; see Callers. Raises InvalidArgument for an id that cannot be a tenant's name."""
        tenant = _first(metadata, FAIRNESS)
        if not tenant:
            return self._callers.of(metadata)
        if self._has_file:
            return self._callers.of({**metadata, TENANT_HEADER: metadata.get(TENANT_HEADER) or tenant})
        if not TENANT_NAME.fullmatch(tenant):
            message = f"is {clip(tenant, 80)!r}; a tenant has 1 to 64 letters, digits, dots, dashes and underscores"
            raise InvalidArgument.field(FAIRNESS[0], message)
        caller = self._callers.of(metadata)
        return Caller(tenant, caller.terms, is_admin=caller.is_admin)

    async def run(self) -> None:
        """Keep the known callers up to date, until cancelled."""
        await self._callers.run()

    def reload(self) -> None:
        """Reload the known callers now."""
        self._callers.reload()


def _first(metadata: Mapping[str, str], names: Sequence[str]) -> str:
    return next((value for name in names if (value := metadata.get(name, ""))), "")


def _seconds(metadata: Mapping[str, str], names: Sequence[str]) -> float | None:
    given = _first(metadata, names)
    if not given:
        return None
    if not _MILLISECONDS.fullmatch(given) or float(given) <= 0:
        raise InvalidArgument.field(names[0], f"is {clip(given, 40)!r}; it takes a positive number of milliseconds")
    return float(given) / 1_000
