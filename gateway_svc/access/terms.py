"""On which terms a tenant is served: the models it may use, how soon, how much, and with whom it shares cached prompts."""

import hashlib
from types import TracebackType
from typing import Self

from gateway_svc.access.quota import TenantQuota, estimated_tokens, used_tokens
from gateway_svc.access.tenants_file import Limits
from gateway_svc.engine.engine_request import EngineRequest
from protos.engine.v1 import engine_pb2
from svc_common.errors import PermissionDenied


class TenantTerms:
    """Terms (gateway_svc.calls) of one tenant of the file. `limits` are those of the moment, `quota` outlives their changes."""

    def __init__(self, tenant: str, limits: Limits, quota: TenantQuota) -> None:
        self._tenant = tenant
        self._limits = limits
        self._quota = quota

    def count_call(self) -> None:
        """See Terms."""
        self._quota.count_call()

    def may_use(self, model: str) -> bool:
        """See Terms."""
        return self._limits.models is None or model in self._limits.models

    def check_model(self, model: str) -> None:
        """See Terms."""
        if not self.may_use(model):
            raise PermissionDenied(
                f"tenant {self._tenant} may not use {model}; ListModels has those that it may",
                reason="MODEL_NOT_ALLOWED",
                metadata={"tenant": self._tenant, "model": model},
            )

    def permit(self, priority: int) -> "TenantPermit":
        """See Terms."""
        return TenantPermit(self, self._quota, priority)

    def check_priority(self, priority: int) -> None:
        """PermissionDenied for one that is too high."""
        highest = self._limits.max_priority
        if priority > highest:
            raise PermissionDenied(
                f"scheduling.priority is {priority}; tenant {self._tenant} may have at most {highest}",
                reason="PRIORITY_NOT_ALLOWED",
                metadata={"tenant": self._tenant, "max_priority": str(highest)},
            )

    def cache_salt(self, asked: str) -> str:
        """The salt of its prompts' blocks: equal for two tenants only where both share.

        Hashed, as what was asked for may be as long as the scheduler takes; with a first letter that keeps the two kinds apart, as
        anybody can compute the hash of another's name.
        """
        if self._limits.shared_cache:
            return f"s{_digest(asked)}" if asked else ""
        return f"t{_digest(self._tenant, asked)}"


class TenantPermit:
    """Permit (gateway_svc.calls) of one call: what it took of the tokens is settled once, at its end, however it ends."""

    __slots__ = ("_begin_s", "_num_taken", "_num_used", "_priority", "_quota", "_terms")

    def __init__(self, terms: TenantTerms, quota: TenantQuota, priority: int) -> None:
        self._terms = terms
        self._quota = quota
        self._priority = priority
        self._begin_s = 0.0
        self._num_taken = 0
        self._num_used = 0

    def __enter__(self) -> Self:
        self._terms.check_priority(self._priority)
        self._begin_s = self._quota.begin_request()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Gives back the tokens that were not used."""
        self._quota.give_tokens_back(self._num_taken - self._num_used)
        self._quota.end_request(self._begin_s)

    def charge(self, submit: engine_pb2.Submit) -> None:
        """See Permit."""
        submit.cache_salt = self._terms.cache_salt(submit.cache_salt)
        num_tokens = estimated_tokens(submit)
        self._quota.take_tokens(num_tokens)
        self._num_taken += num_tokens

    def settle(self, request: EngineRequest) -> None:
        """See Permit."""
        self._num_used += used_tokens(request)


def _digest(*parts: str) -> str:
    """Of the parts with their lengths: no two lists of parts are one text."""
    text = "".join(f"{len(part)}:{part}" for part in parts)
    return hashlib.sha256(text.encode()).hexdigest()
