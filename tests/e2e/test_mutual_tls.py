"""The whole stack with mutual TLS on every hop and API keys: it works, and other callers are refused."""

import json
import shutil
import ssl
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from typer.testing import CliRunner

from gateway_svc.access.keys import hash_key
from quire.cli.requests.models import app as models_command
from quire.client.connections import Credentials, blocking_channel
from quire.client.messages import RequestOptions
from quire.client.outputs import RequestOutput
from quire.client.retrying import NO_RETRIES
from quire.client.sampling_params import SamplingParams
from quire.client.sync_client import Client
from quire.local_stack.certificate_folder import CLIENT, CertificateFolder
from quire.local_stack.certificates import make_certificates
from quire.local_stack.stack import LocalStack
from quire.operators.admin import AdminClient
from quire_tools.commands.bench import app as bench_command
from quire_tools.commands.doctor import app as doctor_command
from svc_common.errors import PermissionDenied, Unauthenticated, Unavailable
from svc_common.net.tls_settings import GATEWAY, SCHEDULER, WORKER
from tests.support.node import node_packages, run_node
from tests.support.stack.commands import ROOT

KEYS = {
    name: f"qk_{name}_0123456789abcdefghijklmnopqrstuvwxyz" for name in ("acme", "globex", "kin", "kith", "operator")
}
PROMPT = "One system prompt that everybody sends, long enough for several blocks of the cache. " * 3
SHORT = SamplingParams(max_tokens=2, ignore_eos=True)
_NODE = """
import { readFileSync } from "node:fs";
import { Quire } from "./quire.mjs";
const [address, ...files] = process.argv.slice(2);
const [rootCertificates, certificate, privateKey] = files.map((file) => readFileSync(file));
const quire = new Quire(address, { apiKey: process.env.QUIRE_API_KEY, rootCertificates, certificate, privateKey });
try {
  const answer = await quire.call("ListModels", {}, { deadlineMs: 20_000 });
  console.log(answer.models[0].name);
} catch (error) {
  console.log(error.reason);
  process.exitCode = 1;
}
quire.close();
"""


def tenants_text() -> str:
    """Two that are alone, two that share, and an operator."""
    shared = {"kin", "kith"}
    parts = [
        f"[tenants.{name}]\nshared_cache = {str(name in shared).lower()}\n[[tenants.{name}.keys]]\n"
        f'sha256 = "{hash_key(key)}"\nadmin = {str(name == "operator").lower()}\n'
        for name, key in KEYS.items()
    ]
    return "\n".join(parts)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> CertificateFolder:
    """Those of the stack."""
    folder = CertificateFolder(tmp_path_factory.mktemp("tls"))
    make_certificates(folder)
    return folder


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> CertificateFolder:
    """Those of another authority."""
    folder = CertificateFolder(tmp_path_factory.mktemp("theirs"))
    make_certificates(folder)
    return folder


@pytest.fixture(scope="module")
def lines() -> list[str]:
    """What the services wrote to standard error."""
    return []


@pytest.fixture(scope="module")
def secure(
    certificates: CertificateFolder, lines: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalStack]:
    """Three processes; every hop encrypted, every caller with a key."""
    tenants = tmp_path_factory.mktemp("tenants") / "tenants.toml"
    tenants.write_text(tenants_text(), encoding="utf-8")
    with LocalStack(
        simulated=True,
        tls=certificates.path,
        tenants=tenants,
        worker_args=("--time-scale", "0"),
        on_line=lambda name, line: lines.append(line),
    ) as running:
        yield running


def credentials(folder: CertificateFolder, tenant: str, ca: CertificateFolder | None = None) -> Credentials:
    """A client's certificate and a tenant's key."""
    return Credentials(
        api_key=KEYS[tenant], tls_ca=(ca or folder).cert("ca"), tls_cert=folder.cert(CLIENT), tls_key=folder.key(CLIENT)
    )


def generated(stack: LocalStack, folder: CertificateFolder, tenant: str, salt: str = "") -> RequestOutput:
    """The common prompt, as that tenant."""
    with Client(stack.grpc_address, credentials=credentials(folder, tenant)) as client:
        return client.generate(PROMPT, SHORT, options=RequestOptions(cache_salt=salt))


def test_tenants_share_no_blocks(secure: LocalStack, certificates: CertificateFolder) -> None:
    """Hits only for the tenant that sent the prompt before, and between those that both share; salts split further."""
    rounds = [
        (tenant, generated(secure, certificates, tenant).num_cached_tokens) for tenant in ("acme", "globex", "acme")
    ]
    assert [(tenant, num > 0) for tenant, num in rounds] == [("acme", False), ("globex", False), ("acme", True)]
    assert generated(secure, certificates, "kin").num_cached_tokens == 0
    assert generated(secure, certificates, "kith").num_cached_tokens > 0
    assert generated(secure, certificates, "acme", salt="apart").num_cached_tokens == 0


def test_clients_without_the_right_certificate_or_key(
    secure: LocalStack, certificates: CertificateFolder, theirs: CertificateFolder
) -> None:
    """No certificate, another authority's, plain text: no connection. A certificate without a key: UNAUTHENTICATED."""
    strangers = [
        Credentials(api_key=KEYS["acme"]),
        Credentials(api_key=KEYS["acme"], tls_ca=certificates.cert("ca")),
        credentials(theirs, "acme", ca=certificates),
        credentials(certificates, "acme", ca=theirs),
    ]
    for stranger in strangers:
        with (
            Client(secure.grpc_address, credentials=stranger, retries=NO_RETRIES) as client,
            pytest.raises(Unavailable),
        ):
            client.models()
    with Client(secure.grpc_address, credentials=secure.credentials) as client, pytest.raises(Unauthenticated):
        client.models()


def test_the_http_door(secure: LocalStack, certificates: CertificateFolder) -> None:
    """HTTPS with a certificate and a key; without the certificate no answer at all."""
    context = ssl.create_default_context(cafile=certificates.cert("ca"))
    with httpx.Client(base_url=secure.http_url, verify=context) as http, pytest.raises(httpx.TransportError):
        http.get("/health/ready")
    context.load_cert_chain(certificates.cert(CLIENT), certificates.key(CLIENT))
    with httpx.Client(base_url=secure.http_url, verify=context) as http:
        assert http.get("/health/ready").status_code == 200
        assert http.get("/v1/models").status_code == 401
        headers = {"authorization": f"Bearer {KEYS['acme']}"}
        assert http.get("/v1/models", headers=headers).json()["data"][0]["id"] == "simulated"


def test_metrics_are_for_clients_that_the_ca_signed(secure: LocalStack, certificates: CertificateFolder) -> None:
    """Scheduler and worker: a Prometheus with a client's certificate, under the name of its service; without one no client."""
    for service, address in secure.metrics_addresses.items():
        context = ssl.create_default_context(cafile=certificates.cert("ca"))
        extensions = {"sni_hostname": service}
        with httpx.Client(verify=context) as http, pytest.raises(httpx.TransportError):
            http.get(f"https://{address}/metrics", extensions=extensions)
        context.load_cert_chain(certificates.cert(CLIENT), certificates.key(CLIENT))
        with httpx.Client(verify=context) as http:
            assert "quire_" in http.get(f"https://{address}/metrics", extensions=extensions).text
        with httpx.Client() as http, pytest.raises(httpx.TransportError):
            http.get(f"http://{address}/metrics")


def test_operators(secure: LocalStack, certificates: CertificateFolder) -> None:
    """The relay behind the gateway's admin door goes over mutual TLS too; users' keys do not open it."""
    with AdminClient(secure.admin_address, credentials=credentials(certificates, "operator")) as admin:
        assert admin.blocks().gpu.total > 0
    user = credentials(certificates, "acme")
    with AdminClient(secure.admin_address, credentials=user) as admin, pytest.raises(PermissionDenied):
        admin.blocks()


def test_services_take_only_their_peers(secure: LocalStack, certificates: CertificateFolder) -> None:
    """Behind the gateway no key helps, and no certificate but that of the right role: at the scheduler's door and the worker's."""
    doors = {secure.scheduler_address: (SCHEDULER, GATEWAY), secure.worker_address: (WORKER, SCHEDULER)}
    found = {
        (role, name): _status(certificates.credentials(name, expects=role), address)
        for address, (role, _) in doors.items()
        for name in (CLIENT, GATEWAY, SCHEDULER, WORKER)
    }
    allowed = {(role, caller) for role, caller in doors.values()}
    assert {caller for caller, status in found.items() if status != "PERMISSION_DENIED"} == allowed
    assert {found[caller] for caller in allowed} == {"ANSWERED"}


def _status(shown: Credentials, address: str) -> str:
    """How the method that each of them has, server reflection, answers there."""
    with blocking_channel(shown)(address) as channel:
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=10
        )
        try:
            return "ANSWERED" if next(call).list_services_response.service else "NOTHING"
        except grpc.RpcError as error:
            return str(error.code().name)


def test_commands_take_credentials(secure: LocalStack, certificates: CertificateFolder) -> None:
    """By options, or by variables."""
    options = {
        "--target": secure.grpc_address,
        "--tls-ca": certificates.cert("ca"),
        "--tls-cert": certificates.cert(CLIENT),
        "--tls-key": certificates.key(CLIENT),
    }
    arguments = [str(part) for pair in options.items() for part in pair]
    result = CliRunner().invoke(models_command, arguments, env={"QUIRE_API_KEY": KEYS["acme"]}, catch_exceptions=False)
    assert (result.exit_code, "simulated" in result.stdout) == (0, True)
    result = CliRunner().invoke(models_command, arguments, env={"QUIRE_API_KEY": ""})
    assert isinstance(result.exception, Unauthenticated)


@pytest.mark.parametrize("door", ["grpc", "openai"])
def test_bench_takes_credentials(secure: LocalStack, certificates: CertificateFolder, door: str) -> None:
    """At both doors; nothing fails."""
    options = (*_call_options(certificates), "--target", secure.grpc_address, "--url", secure.http_url, "--door", door)
    arguments = (*options, "-n", "2", "--warmup", "0", "--output-len", "2", "--json")
    result = CliRunner().invoke(bench_command, arguments, env={"QUIRE_API_KEY": KEYS["acme"]}, catch_exceptions=False)
    assert json.loads(result.stdout)["summary"]["failed"] == 0


def test_doctor_takes_credentials(secure: LocalStack, certificates: CertificateFolder) -> None:
    """Of a client for gateway and admin API; without them it says what is wrong."""
    doors = ("--json", "--target", secure.grpc_address, "--admin", secure.admin_address)
    key = {"QUIRE_API_KEY": KEYS["operator"]}
    found = CliRunner().invoke(doctor_command, (*doors, *_call_options(certificates)), env=key, catch_exceptions=False)
    states = {one["name"]: one["state"] for one in json.loads(found.stdout)["findings"]}
    assert (states["gateway"], states["scheduler"], states["worker"]) == ("ok", "ok", "ok")
    blind = CliRunner().invoke(doctor_command, doors, env=key)
    assert blind.exit_code == 1 and "disagree on TLS" in blind.stdout


def test_the_example_in_node_takes_credentials(
    secure: LocalStack, certificates: CertificateFolder, tmp_path: Path
) -> None:
    """Its client shows a certificate and a key; without the certificate there is no connection."""
    folder = tmp_path / "examples" / "node"
    shutil.copytree(ROOT / "examples" / "node", folder, ignore=shutil.ignore_patterns("node_modules"))
    (folder / "node_modules").symlink_to(node_packages("example"))
    (tmp_path / "protos").symlink_to(ROOT / "protos")
    (folder / "secure.mjs").write_text(_NODE, encoding="utf-8")
    environ = {"QUIRE_API_KEY": KEYS["acme"]}
    files = [str(path) for path in (certificates.cert("ca"), certificates.cert(CLIENT), certificates.key(CLIENT))]
    found = run_node(folder, "secure.mjs", secure.grpc_address, *files, environ=environ)
    assert (found.returncode, len(found.stdout.split())) == (0, 1), found.stderr
    without = run_node(folder, "secure.mjs", secure.grpc_address, files[0], environ=environ)
    assert without.returncode == 1 and "UNAVAILABLE" in without.stdout


def _call_options(certificates: CertificateFolder) -> tuple[str, ...]:
    return (
        *("--tls-ca", str(certificates.cert("ca"))),
        *("--tls-cert", str(certificates.cert(CLIENT)), "--tls-key", str(certificates.key(CLIENT))),
    )


def test_no_key_is_in_the_log(secure: LocalStack, lines: list[str]) -> None:
    """Whatever the tests above did."""
    assert lines
    assert not [line for line in lines if any(key in line for key in KEYS.values())]
