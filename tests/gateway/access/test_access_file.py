"""The tenants file: what it may say, how keys are found, how it is read again, and `quire keys`."""

import datetime
import logging
import os
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gateway_svc.access.keys import Keyring, hash_key, key_of, new_key
from gateway_svc.access.tenant_callers import TenantCallers
from gateway_svc.access.tenants_file import parse_tenants, read_tenants
from quire.cli.serving.keys import app as keys_command
from svc_common.errors import ConfigError, PermissionDenied, QuireError, ResourceExhausted, Unauthenticated
from tests.support.services.access_keys import FILE, KEYS, bearer, tenants_file

FAR = datetime.datetime(2100, 1, 1, tzinfo=datetime.UTC)


def reason_of(callers: TenantCallers, headers: dict[str, str]) -> str:
    """Why the caller is refused."""
    with pytest.raises(QuireError) as refused:
        callers.of(headers)
    return refused.value.reason


def test_keys_have_enough_bits_and_only_their_hash_is_kept(tmp_path: Path) -> None:
    """SHA-256 of keys with at least 128 random bits."""
    made = {new_key() for _ in range(100)}
    assert len(made) == 100
    assert all(len(key.removeprefix("qk_")) * 6 >= 256 for key in made)
    assert not any(key in tenants_file(tmp_path).read_text() for key in KEYS.values())


def test_a_key_identifies_its_caller(tmp_path: Path) -> None:
    """Whatever else the metadata says; the scheme's letters do not matter."""
    callers = TenantCallers(tenants_file(tmp_path))
    acme = callers.of(bearer("acme") | {"x-tenant-id": "acme"})
    assert (acme.tenant, acme.is_admin) == ("acme", False)
    assert callers.of({"authorization": f"bEARER  {KEYS['operator']}"}).is_admin
    assert callers.of(bearer("proxy") | {"x-tenant-id": "globex"}).tenant == "globex"
    assert callers.of(bearer("proxy")).tenant == "house"


@pytest.mark.parametrize(
    ("headers", "reason"),
    [
        ({}, "MISSING_KEY"),
        ({"authorization": ""}, "MISSING_KEY"),
        ({"authorization": "Bearer "}, "MISSING_KEY"),
        ({"authorization": f"Basic {KEYS['acme']}"}, "MISSING_KEY"),
        ({"authorization": KEYS["acme"]}, "MISSING_KEY"),
        ({"authorization": "Bearer " + "x" * 10_000}, "MISSING_KEY"),
        ({"authorization": f"Bearer {KEYS['acme']}x"}, "UNKNOWN_KEY"),
        ({"authorization": f"Bearer {hash_key(KEYS['acme'])}"}, "UNKNOWN_KEY"),
        ({"authorization": "Bearer \udcff"}, "UNKNOWN_KEY"),
        (bearer("expired"), "EXPIRED_KEY"),
        (bearer("acme") | {"x-tenant-id": "globex"}, "TENANT_NOT_ALLOWED"),
        (bearer("proxy") | {"x-tenant-id": "nobody"}, "TENANT_NOT_ALLOWED"),
    ],
)
def test_which_callers_are_refused_and_why(tmp_path: Path, headers: dict[str, str], reason: str) -> None:
    """The key itself is in no message."""
    callers = TenantCallers(tenants_file(tmp_path))
    with pytest.raises((Unauthenticated, PermissionDenied)) as refused:
        callers.of(headers)
    assert refused.value.reason == reason
    assert not any(key in refused.value.message for key in KEYS.values())


def test_a_key_expires_while_the_gateway_runs(tmp_path: Path) -> None:
    """Not only when the file is read."""
    now = [datetime.datetime(2019, 1, 1, tzinfo=datetime.UTC)]
    callers = TenantCallers(tenants_file(tmp_path), now=lambda: now[0])
    assert callers.of(bearer("expired")).tenant == "acme"
    now[0] = FAR
    assert reason_of(callers, bearer("expired")) == "EXPIRED_KEY"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[tenants", "no TOML"),
        ("[tenants.a]\nrate = 3", "tenants.a.rate"),
        ("[tenants.a]\nburst = 3", "requests_per_s"),
        ("[tenants.a]\nrequests_per_s = -1", "requests_per_s"),
        ("[tenants.a]\nrequests_per_s = nan", "requests_per_s"),
        ("[tenants.a]\nconcurrent_requests = 0", "concurrent_requests"),
        (f'[[tenants.a.keys]]\nsha256 = "{KEYS["acme"]}"', "never the key itself"),
        (f'[[tenants.a.keys]]\nsha256 = "{"0" * 64}"\nexpires = 2030-01-01T00:00:00', "expires"),
        (f'[[tenants.a.keys]]\nsha256 = "{"0" * 64}"\n[[tenants.b.keys]]\nsha256 = "{"0" * 64}"', "twice"),
        ('[tenants."a b"]', "a name has letters"),
        ("\udcff", "not UTF-8"),
    ],
)
def test_a_broken_file_is_refused_by_place_and_never_by_value(tmp_path: Path, text: str, said: str) -> None:
    """If a key is written where its hash belongs, it must not get into the log."""
    path = tmp_path / "tenants.toml"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError, match=said) as refused:
        read_tenants(path)
    assert KEYS["acme"] not in refused.value.message
    assert str(path) in refused.value.message


def test_a_missing_file_is_a_config_error(tmp_path: Path) -> None:
    """At the start; no caller is admitted by mistake."""
    with pytest.raises(ConfigError, match="No such file"):
        TenantCallers(tmp_path / "none.toml")


def test_a_changed_file_counts_without_restart(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A key that is gone is refused; a broken file and a missing one keep what was, and the log says why."""
    path = tenants_file(tmp_path)
    callers = TenantCallers(path)
    before = callers.of(bearer("globex"))
    tenants_file(tmp_path, FILE.replace(hash_key(KEYS["globex"]), "1" * 64))
    os.utime(path, ns=(1, 1))
    callers.look()
    assert reason_of(callers, bearer("globex")) == "UNKNOWN_KEY"
    assert callers.of(bearer("acme")).tenant == "acme"
    with before.terms.permit(0):
        pass  # what began goes on
    tenants_file(tmp_path, "[tenants")
    with caplog.at_level(logging.ERROR):
        callers.look()
    assert "stays in force" in caplog.text
    assert callers.of(bearer("acme")).tenant == "acme"
    path.unlink()
    callers.look()
    assert callers.of(bearer("acme")).tenant == "acme"


def test_a_new_file_does_not_fill_the_buckets(tmp_path: Path) -> None:
    """Otherwise a tenant's quota would begin anew whenever any key changes; new limits count at once."""
    limited = FILE.replace("[tenants.globex]", "[tenants.globex]\nrequests_per_s = 0.001\nconcurrent_requests = 1")
    callers = TenantCallers(tenants_file(tmp_path, limited))
    callers.of(bearer("globex")).terms.count_call()
    tenants_file(tmp_path, limited + "\n# changed\n")
    callers.reload()
    with pytest.raises(ResourceExhausted):
        callers.of(bearer("globex")).terms.count_call()
    with callers.of(bearer("globex")).terms.permit(0):
        callers.reload()
        with pytest.raises(ResourceExhausted), callers.of(bearer("globex")).terms.permit(0):
            pass
        tenants_file(tmp_path, FILE)
        callers.reload()
        with callers.of(bearer("globex")).terms.permit(0):
            callers.of(bearer("globex")).terms.count_call()


def test_the_part_of_a_hash_that_finds_candidates_is_not_enough() -> None:
    """Two keys whose hashes begin alike are told apart by the rest."""
    digest = hash_key("right")
    twin = digest[:32] + "0" * 32
    text = f'[[tenants.a.keys]]\nsha256 = "{twin}"\n[[tenants.b.keys]]\nsha256 = "{digest}"'
    found = Keyring(parse_tenants(text, Path("x"))).find("right")
    assert found is not None
    assert found.tenant == "b"
    assert key_of({"authorization": "Bearer right"}) == "right"


class TestCommand:
    """`quire keys`."""

    def run(self, *arguments: str, given: str = "") -> str:
        result = CliRunner().invoke(keys_command, arguments, input=given, catch_exceptions=False)
        assert result.exit_code == 0
        return result.stdout

    def test_new_adds_to_a_file_that_a_gateway_takes_up(self, tmp_path: Path) -> None:
        """The key is shown once; the file has its hash, and what was there before."""
        path = tenants_file(tmp_path)
        callers = TenantCallers(path)
        key = self.run("new", "acme", "--file", str(path), "--days", "3", "--name", 'so "called"', "--admin").strip()
        callers.look()
        caller = callers.of({"authorization": f"Bearer {key}"})
        assert (caller.tenant, caller.is_admin) == ("acme", True)
        assert key not in path.read_text()
        assert path.read_text().startswith(FILE.rstrip())
        shown = self.run("list", str(path))
        assert "acme" in shown
        assert key not in shown
        assert "the key is acme's" in self.run("check", str(path), "--key", given=f"{key}\n")

    def test_a_new_file_is_for_its_owner_alone(self, tmp_path: Path) -> None:
        """Hashes are no secrets, but which key has which rights is."""
        path = tmp_path / "new.toml"
        self.run("new", "acme", "--file", str(path))
        assert path.stat().st_mode & 0o777 == 0o600
        assert list(tomllib.loads(path.read_text())["tenants"]) == ["acme"]

    def test_hash_is_that_of_the_key(self) -> None:
        """As sha256sum has it."""
        assert self.run("hash", given="abc\n").strip() == hash_key("abc")
        assert hash_key("abc").startswith("ba7816bf8f01cfea")

    def test_a_key_that_is_not_in_the_file_fails_the_check(self, tmp_path: Path) -> None:
        """With the reason that the gateway would give."""
        with pytest.raises(Unauthenticated, match="not in the file"):
            self.run("check", str(tenants_file(tmp_path)), "--key", given="nobody\n")
