"""Keys and tenants files for the tests of access control."""

from pathlib import Path

from gateway_svc.access.keys import hash_key

KEYS = {
    name: f"qk_test_{name}_0123456789abcdefghijklmnop" for name in ("acme", "globex", "operator", "proxy", "expired")
}

FILE = f"""
[tenants.acme]
max_priority = 2
models = ["tiny"]
[[tenants.acme.keys]]
name = "ci"
sha256 = "{hash_key(KEYS["acme"])}"
[[tenants.acme.keys]]
sha256 = "{hash_key(KEYS["expired"])}"
expires = 2020-01-01T00:00:00Z

[tenants.globex]
models = ["sql"]
[[tenants.globex.keys]]
sha256 = "{hash_key(KEYS["globex"])}"

[tenants.house]
[[tenants.house.keys]]
sha256 = "{hash_key(KEYS["operator"])}"
admin = true
[[tenants.house.keys]]
sha256 = "{hash_key(KEYS["proxy"])}"
may_name_tenants = true
"""


def tenants_file(folder: Path, text: str = FILE) -> Path:
    """A file in `folder`."""
    path = folder / "tenants.toml"
    path.write_text(text, encoding="utf-8")
    return path


def bearer(name: str) -> dict[str, str]:
    """Metadata or headers with that key."""
    return {"authorization": f"Bearer {KEYS[name]}"}


def metadata(name: str, **more: str) -> tuple[tuple[str, str], ...]:
    """The same for gRPC."""
    return tuple((bearer(name) | {key.replace("_", "-"): value for key, value in more.items()}).items())
