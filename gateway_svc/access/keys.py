"""API keys: generation, hashing, lookup. The gateway stores only their hashes."""

import hashlib
import hmac
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

from gateway_svc.access.tenants_file import TenantKey, Tenants
from svc_common.errors import Unauthenticated

KEY_PREFIX = "qk_"
_KEY_BYTES = 32
_LOOKUP_DIGITS = 16
_SCHEME = "bearer"
_LONGEST_KEY = 512


def new_key() -> str:
    """Generate a key of 256 random bits.

    A plain hash of that many reveals nothing, so no salt or slow hash is needed.
    """
    return KEY_PREFIX + secrets.token_urlsafe(_KEY_BYTES)


def hash_key(key: str) -> str:
    """SHA-256 of a key, 64 hex digits in lower case."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


@dataclass(frozen=True, slots=True)
class KeyOfTenant:
    """A key with its tenant."""

    tenant: str
    key: TenantKey


class Keyring:
    """All keys of a tenants file, by hash."""

    def __init__(self, tenants: Tenants) -> None:
        self._found: dict[str, list[KeyOfTenant]] = {}
        for name, tenant in tenants.tenants.items():
            for key in tenant.keys:
                self._found.setdefault(key.sha256[:_LOOKUP_DIGITS], []).append(KeyOfTenant(name, key))

    def find(self, key: str) -> KeyOfTenant | None:
        """Find a key's tenant.

        Part of the hash selects candidates, which a caller cannot steer; the rest is compared in constant
        time.
        """
        hashed = hash_key(key)
        candidates = self._found.get(hashed[:_LOOKUP_DIGITS], ())
        return next((found for found in candidates if hmac.compare_digest(found.key.sha256, hashed)), None)


def key_of(metadata: Mapping[str, str]) -> str:
    """Return the key in `authorization: Bearer KEY`, else in `x-api-key: KEY`, as some packages for Anthropic's API send it.

    Raises Unauthenticated (MISSING_KEY) if there is none.
    """
    scheme, _, key = metadata.get("authorization", "").partition(" ")
    key = (key if scheme.lower() == _SCHEME else metadata.get("x-api-key", "")).strip()
    if not 0 < len(key) <= _LONGEST_KEY:
        raise Unauthenticated(
            "this gateway wants an API key: send `authorization: Bearer KEY` (--api-key or QUIRE_API_KEY of our own clients) "
            "or `x-api-key: KEY`",
            reason="MISSING_KEY",
        )
    return key
