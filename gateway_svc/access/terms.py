"""Terms of one tenant: models, priority, quota, and the tenants with which it shares cached prompts."""

import hashlib
from types import TracebackType
from typing import Self

from gateway_svc.access.quota import TenantQuota, estimated_tokens, used_tokens
from gateway_svc.access.tenants_file import TenantLimits
from gateway_svc.requests.engine_request import EngineRequest
from protos.engine.v1 import engine_pb2
from svc_common.errors import PermissionDenied


class TenantTerms:
    """Terms (gateway_svc.calls) of one tenant of the file.

    `limits` are the current ones; `quota` survives their changes.
    """

    def __init__(self, tenant: str, limits: TenantLimits, quota: TenantQuota) -> None:
        self._tenant = tenant
        self._limits = limits
        self._quota = quota

    def count_call(self) -> None:
        """Count one call; see Terms."""
        self._quota.count_call()

    def may_use(self, model: str) -> bool:
        """True if the tenant may use the model; see Terms."""
        return self._limits.models is None or model in self._limits.models

    def check_model(self, model: str) -> None:
        """Raise PermissionDenied if the tenant may not use the model."""
        if not self.may_use(model):
            raise PermissionDenied(
                f"tenant {self._tenant} may not use {model}; ListModels has those that it may",
                reason="MODEL_NOT_ALLOWED",
                metadata={"tenant": self._tenant, "model": model},
            )

    def permit(self, priority: int) -> "TenantPermit":
        """Return the permit for a call; see Terms."""
        return TenantPermit(self, self._quota, priority)

    def check_priority(self, priority: int) -> None:
        """Raise PermissionDenied for a priority above the tenant's limit."""
        highest = self._limits.max_priority
        if priority > highest:
            raise PermissionDenied(
                f"scheduling.priority is {priority}; tenant {self._tenant} may have at most {highest}",
                reason="PRIORITY_NOT_ALLOWED",
                metadata={"tenant": self._tenant, "max_priority": str(highest)},
            )

    def cache_salt(self, asked: str) -> str:
        """Cache salt of its prompts' blocks: equal for two tenants only if both share.

        Hashed, because the requested salt may already have the scheduler's maximum length. The first letter
        keeps shared and private salts apart, since any tenant can compute the hash of another's name.
        """
        if self._limits.shared_cache:
            return f"s{_digest(asked)}" if asked else ""
        return f"t{_digest(self._tenant, asked)}"


class TenantPermit:
    """Permit (gateway_svc.calls) of one call; the tokens it took are settled once, at its end in any case."""

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
        """Return the tokens that were not used."""
        self._quota.give_tokens_back(self._num_taken - self._num_used)
        self._quota.end_request(self._begin_s)

    def charge(self, submit: engine_pb2.Submit) -> None:
        """Charge a request's maximum cost and set its cache salt; see Permit."""
        submit.cache_salt = self._terms.cache_salt(submit.cache_salt)
        num_tokens = estimated_tokens(submit)
        self._quota.take_tokens(num_tokens)
        self._num_taken += num_tokens

    def settle(self, request: EngineRequest) -> None:
        """Add the tokens that a request used; see Permit."""
        self._num_used += used_tokens(request)


def _digest(*parts: str) -> str:
    """Hash of the parts with their lengths, so that different lists of parts differ."""
    text = "".join(f"{len(part)}:{part}" for part in parts)
    return hashlib.sha256(text.encode()).hexdigest()
