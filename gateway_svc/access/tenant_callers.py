"""Identify callers by API key, from the tenants file, which is reloaded whenever it changes."""

import asyncio
import datetime
import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from gateway_svc.access.keys import KeyOfTenant, Keyring, key_of
from gateway_svc.access.quota import TenantQuota
from gateway_svc.access.tenants_file import read_tenants
from gateway_svc.access.terms import TenantTerms
from gateway_svc.calls import Caller
from svc_common.errors import ConfigError, PermissionDenied, Unauthenticated

log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
TENANT_HEADER = "x-tenant-id"

_Version = tuple[int, int, int] | None


class TenantCallers:
    """Callers (gateway_svc.calls) of a tenants file, with their tenants' quota use.

    Raises ConfigError for an unusable file. A request keeps the terms it began with: after its key is removed
    it goes on, but new ones are refused.
    """

    def __init__(self, path: Path, now: Callable[[], datetime.datetime] = lambda: datetime.datetime.now(datetime.UTC)):
        self._path = path
        self._now = now
        self._quotas: dict[str, TenantQuota] = {}
        self._terms: dict[str, TenantTerms] = {}
        self._version = _version(path)
        self._keyring = self._read()

    def of(self, metadata: Mapping[str, str]) -> Caller:
        """Identify the caller of a call; see Callers."""
        found = self._keyring.find(key_of(metadata))
        if found is None:
            raise Unauthenticated("this API key is not known here", reason="UNKNOWN_KEY")
        if found.key.has_expired(self._now()):
            raise Unauthenticated(
                f"this API key of tenant {found.tenant} has expired; ask the operator for another", reason="EXPIRED_KEY"
            )
        tenant = self._tenant_of(found, metadata.get(TENANT_HEADER, ""))
        return Caller(tenant, self._terms[tenant], is_admin=found.key.admin)

    def _tenant_of(self, found: KeyOfTenant, named: str) -> str:
        """Tenant of a call.

        A disallowed name is refused rather than ignored, or the call would count for another tenant than
        meant.
        """
        if named in {"", found.tenant}:
            return found.tenant
        if not found.key.may_name_tenants or named not in self._terms:
            raise PermissionDenied(
                f"{TENANT_HEADER}: this key of tenant {found.tenant} may not speak for the tenant that is named; leave it out, or "
                "have the key marked may_name_tenants and the tenant in the file",
                reason="TENANT_NOT_ALLOWED",
                metadata={"tenant": found.tenant},
            )
        return named

    # --- the file ----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Reload the file when it changes, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            self.look()

    def look(self) -> None:
        """Reload the file if it has changed."""
        version = _version(self._path)
        if version != self._version:
            self._version = version
            self.reload()

    def reload(self) -> None:
        """Reload the file; an unusable one changes nothing and is logged."""
        try:
            self._keyring = self._read()
        except ConfigError as error:
            log.error("the changed tenants file is no use, the old one stays in force: %s", error.message)
        else:
            log.info("tenants file %s: %d tenants", self._path, len(self._terms))

    def _read(self) -> Keyring:
        tenants = read_tenants(self._path)
        keyring = Keyring(tenants)
        # Removed tenants keep their quota while their requests run, so that re-adding one does not refill its
        # buckets.
        quotas = {name: quota for name, quota in self._quotas.items() if quota.num_running or name in tenants.tenants}
        for name, limits in tenants.tenants.items():
            quotas.setdefault(name, TenantQuota(name, limits)).change(limits)
        self._quotas = quotas
        self._terms = {name: TenantTerms(name, limits, quotas[name]) for name, limits in tenants.tenants.items()}
        return keyring


def _version(path: Path) -> _Version:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size
