"""The tenants file: tenants, their hashed keys, and their limits. TOML; see docs/access.md.

[tenants.acme]
requests_per_s = 20
tokens_per_min = 200_000

[[tenants.acme.keys]]
name = "ci"
sha256 = "9f86d081884c7d65..."
"""

import datetime
import re
import tomllib
from pathlib import Path
from typing import Annotated

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from svc_common.errors import ConfigError

TENANT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
MAX_FILE_BYTES = 16 * 2**20

_Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-fA-F]{64}$", to_lower=True)]
_Positive = Annotated[float, Field(gt=0, le=1e9)]
_Count = Annotated[int, Field(ge=1, le=10**12)]


class TenantKey(BaseModel):
    """One key. `name`: for people, in lists and logs. `expires`: with time zone; None = never."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    sha256: _Sha256
    name: str = ""
    expires: AwareDatetime | None = None
    admin: bool = False
    """The key may use the admin listener."""
    may_name_tenants: bool = False
    """For a proxy that knows its users: its `x-tenant-id` names the tenant of a call."""

    def has_expired(self, now: datetime.datetime) -> bool:
        """True if the key is no longer valid."""
        return self.expires is not None and now >= self.expires


class TenantLimits(BaseModel):
    """Limits of a tenant; None = unlimited. Each gateway process counts separately."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    requests_per_s: _Positive | None = None
    burst: _Count | None = None
    """Calls that may arrive at once; None = one second's worth."""
    concurrent_requests: _Count | None = None
    tokens_per_min: _Count | None = None
    """Prompt and output; a request is charged its maximum cost first and refunded what it did not use."""
    max_priority: int = 0
    """Highest priority that requests may ask for."""
    models: frozenset[str] | None = None
    """Names of allowed models and adapters; None = all."""
    shared_cache: bool = False
    """Share cached prompt blocks with other tenants that also set this."""

    @property
    def burst_or_default(self) -> float:
        """Calls that may arrive at once."""
        return float(self.burst or max(1.0, self.requests_per_s or 1.0))


class TenantEntry(TenantLimits):
    """One tenant."""

    keys: tuple[TenantKey, ...] = ()

    @model_validator(mode="after")
    def _burst_needs_a_rate(self) -> "TenantEntry":
        if self.burst is not None and self.requests_per_s is None:
            raise ValueError("burst says nothing without requests_per_s")
        return self


class Tenants(BaseModel):
    """The whole file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tenants: dict[str, TenantEntry] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _names_and_keys_are_of_use(self) -> "Tenants":
        for name in self.tenants:
            if not TENANT_NAME.fullmatch(name):
                raise ValueError(
                    f"tenant {name[:80]!r}: a name has letters, digits, dots, dashes and underscores, at most 64"
                )
        hashes = [key.sha256 for tenant in self.tenants.values() for key in tenant.keys]
        if len(set(hashes)) < len(hashes):
            raise ValueError("one key is there twice; each belongs to one tenant")
        return self


def read_tenants(path: Path) -> Tenants:
    """Read the file. Raises ConfigError with place and reason, but never a value, which may be a key by mistake."""
    try:
        raw = path.read_bytes()
        if len(raw) > MAX_FILE_BYTES:
            raise _useless(path, f"it is larger than {MAX_FILE_BYTES} bytes")
        return parse_tenants(raw.decode("utf-8"), path)
    except OSError as error:
        raise _useless(path, error.strerror or "it cannot be read") from None
    except UnicodeDecodeError:
        raise _useless(path, "it is not UTF-8") from None


def parse_tenants(text: str, path: Path) -> Tenants:
    """Parse the file's text; raises as `read_tenants`."""
    try:
        return Tenants.model_validate(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        where = re.search(r"\(at [^)]*\)", str(error))
        raise _useless(path, f"it is no TOML {where[0] if where else ''}".rstrip()) from None
    except ValidationError as error:
        raise _useless(path, "; ".join(_said(item["loc"], item["msg"]) for item in error.errors())) from None


def _said(place: tuple[int | str, ...], message: str) -> str:
    where = ".".join(str(part)[:80] for part in place)
    what = message.removeprefix("Value error, ")
    if place and place[-1] == "sha256":
        what = "must be the 64 hex digits of the key's SHA-256, never the key itself (`quire keys hash`)"
    return f"{where}: {what}" if where else what


def _useless(path: Path, reason: str) -> ConfigError:
    return ConfigError(f"--tenants {path}: {reason}", reason="TENANTS_FILE", metadata={"path": str(path)})
