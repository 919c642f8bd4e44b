"""deploy/compose.access.yml: certificates on every hop, keys at the doors, each secret only where it is needed (docs/access.md)."""

import os
from pathlib import Path

import grpc
import pytest

from quire.client.connections import Credentials
from quire.client.retrying import NO_RETRIES
from quire.client.sampling_params import SamplingParams
from quire.client.sync_client import Client
from svc_common.errors import Unauthenticated, Unavailable
from tests.compose.checks.conftest import Stacks
from tests.compose.checks.requests import targets, wait_for_targets
from tests.compose.stack import GRPC, Setup, Stack
from tests.support.commands import ROOT, run

USER, PROMETHEUS_USER = 10001, 65534
PARAMS = SamplingParams(max_tokens=8, temperature=0.0)


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder of certificates with a tenants file, and the key that is in it; made by the commands of docs/access.md."""
    folder = tmp_path_factory.mktemp("secrets")
    quire = ROOT / ".venv" / "bin" / "quire"
    run(quire, "certs", folder)
    key = run(quire, "keys", "new", "acme", "--file", folder / "tenants.toml").strip().splitlines()[-1]
    for file in (*folder.glob("*-key.pem"), folder / "tenants.toml"):
        os.chown(file, USER, USER)
    os.chown(folder / "client-key.pem", PROMETHEUS_USER, PROMETHEUS_USER)
    return folder, key


@pytest.fixture
def guarded(stacks: Stacks, secrets: tuple[Path, str]) -> Stack:
    """The CPU stack with them."""
    folder, _ = secrets
    environ = {"QUIRE_CERTS": str(folder), "QUIRE_TENANTS": str(folder / "tenants.toml")}
    return stacks.need("access", Setup("cpu", ("deploy/compose.access.yml",), environ))


def test_key_and_certificate_open_the_door(guarded: Stack, secrets: tuple[Path, str]) -> None:
    """With both it serves; without the key it says so; plain text is not answered."""
    folder, key = secrets
    with Client(GRPC, credentials=_credentials(folder, key)) as door:
        assert door.generate("def main():", PARAMS, timeout_s=60).text
    with Client(GRPC, credentials=_credentials(folder, ""), retries=NO_RETRIES) as door, pytest.raises(Unauthenticated):
        door.generate("def main():", PARAMS, timeout_s=10)
    with Client(GRPC, retries=NO_RETRIES) as door, pytest.raises((Unavailable, grpc.RpcError)):
        door.generate("def main():", PARAMS, timeout_s=10)


def _credentials(folder: Path, key: str) -> Credentials:
    files = {f"tls_{part}": folder / name for part, name in _FILES.items()}
    return Credentials(api_key=key, tls_name="localhost", **files)


_FILES = {"ca": "ca.pem", "cert": "client.pem", "key": "client-key.pem"}


def test_secrets_are_only_where_they_are_needed(guarded: Stack) -> None:
    """A worker that is broken into gives away no other service's key."""
    seen = {}
    for service in SEEN:
        done = guarded.python(service, "import os; print(*sorted(os.listdir('/run/secrets')))")
        seen[service] = done.stdout.split()
    assert seen == SEEN


SEEN = {
    "gateway": ["ca.pem", "gateway-key.pem", "gateway.pem", "tenants.toml"],
    "scheduler": ["ca.pem", "scheduler-key.pem", "scheduler.pem"],
    "worker": ["ca.pem", "worker-key.pem", "worker.pem"],
}


def test_prometheus_shows_a_certificate(guarded: Stack) -> None:
    """All targets up over TLS: deploy/prometheus/access.yml."""
    wait_for_targets()
    urls = {target["scrapeUrl"].split(":")[0] for target in targets() if target["labels"]["job"] != "collector"}
    assert urls == {"https"}
