"""Encryption between services: which callers and servers are accepted, renewal without restart, no plain text elsewhere."""

import asyncio
import contextlib
import logging
import ssl
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio

from protos.engine.v1 import engine_pb2, engine_pb2_grpc
from quire.local_stack.certificate_folder import CLIENT, NAMES, CertificateFolder
from quire.local_stack.certificates import make_certificates
from svc_common import health_probe
from svc_common.errors import ConfigError, PermissionDenied, Unavailable
from svc_common.net import rpc, tls
from svc_common.net.peers import Peers
from svc_common.net.tls_settings import GATEWAY, SCHEDULER, WORKER, DoorSettings, PeerSettings
from tests.support.services.scripted_engine import ScriptedEngine, asynchronous

ANSWER_S = 10.0


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> CertificateFolder:
    """Certificates of another authority."""
    return made(tmp_path_factory.mktemp("theirs"))


@pytest.fixture
def ours(tmp_path: Path) -> CertificateFolder:
    """Certificates that a test may renew."""
    return made(tmp_path / "ours")


def made(path: Path) -> CertificateFolder:
    folder = CertificateFolder(path)
    make_certificates(folder)
    return folder


def peers(folder: CertificateFolder, name: str, *names: str, ca: CertificateFolder | None = None) -> Peers:
    """A service that shows the certificate of that name."""
    trusted = (ca or folder).cert("ca")
    return Peers(PeerSettings.of(ca=trusted, cert=folder.cert(name), key=folder.key(name), names=names))


@contextlib.asynccontextmanager
async def listening(service: Peers, *callers: str) -> AsyncIterator[str]:
    """EngineService and health behind `service`; its address."""
    server = service.server(*callers)
    engine_pb2_grpc.add_EngineServiceServicer_to_server(ScriptedEngine(), server)
    health = health_aio.HealthServicer()
    await health.set("", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    port = service.bind(server, "127.0.0.1", 0, option="--port")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def fetch(channel: grpc.aio.Channel) -> int:
    """Bytes of a bundle, over a method that streams. QuireError."""
    call = engine_pb2_grpc.EngineServiceStub(channel).GetModelBundle(
        engine_pb2.GetModelBundleRequest(), timeout=ANSWER_S
    )
    try:
        return sum([len(part.chunk) async for part in call])
    except grpc.aio.AioRpcError as error:
        raise rpc.from_rpc_error(error) from None


async def attach(channel: grpc.aio.Channel) -> grpc.aio.StreamStreamCall:
    """A stream that stays open."""
    call = engine_pb2_grpc.EngineServiceStub(channel).Attach(timeout=ANSWER_S)
    await call.write(engine_pb2.FrontendMessage(hello=engine_pb2.FrontendHello()))
    assert (await call.read()).HasField("welcome")
    return call


async def refused_stream(channel: grpc.aio.Channel) -> None:
    """A stream that is refused before its first message. QuireError.

    Nothing is written: gRPC reports INTERNAL instead of the status if a write fails because the stream has
    ended (github.com/grpc/grpc/issues/36066).
    """
    try:
        await engine_pb2_grpc.EngineServiceStub(channel).Attach(timeout=ANSWER_S).read()
    except grpc.aio.AioRpcError as error:
        raise rpc.from_rpc_error(error) from None


@asynchronous
async def test_only_callers_of_the_right_name_are_let_in(tmp_path: Path) -> None:
    """A certificate of the right authority alone opens nothing but health."""
    folder = made(tmp_path / "ours")
    async with listening(peers(folder, SCHEDULER), GATEWAY) as address:
        for name in NAMES:
            async with peers(folder, name).channel(address, SCHEDULER) as channel:
                assert (await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())).status == 1
                if name == GATEWAY:
                    assert await fetch(channel) > 0
                    (await attach(channel)).cancel()
                    continue
                for call in (fetch, refused_stream):
                    with pytest.raises(PermissionDenied, match=f"for {name}") as refused:
                        await call(channel)
                    assert refused.value.reason == "PEER_NAME"


@asynchronous
async def test_names_may_be_others_than_the_roles(tmp_path: Path) -> None:
    """`--peer-name` replaces the role's name, for clients and for servers."""
    folder = made(tmp_path / "ours")
    async with listening(peers(folder, WORKER, "gateway=client"), GATEWAY) as address:
        async with peers(folder, CLIENT, "scheduler=worker").channel(address, SCHEDULER) as channel:
            assert await fetch(channel) > 0
        async with peers(folder, GATEWAY, "scheduler=worker").channel(address, SCHEDULER) as channel:
            with pytest.raises(PermissionDenied):
                await fetch(channel)


@asynchronous
async def test_strangers_get_no_connection(tmp_path: Path, theirs: CertificateFolder) -> None:
    """No certificate, one of another authority, plain text: the handshake fails."""
    folder = made(tmp_path / "ours")
    async with listening(peers(folder, SCHEDULER), GATEWAY) as address:
        no_certificate = tls.channel_credentials(tls.TlsFiles(ca=folder.cert("ca")).read())
        channels = [
            peers(theirs, GATEWAY, ca=folder).channel(address, SCHEDULER),
            rpc.channel(address, credentials=no_certificate, options=tls.expects(SCHEDULER)),
            rpc.channel(address),
        ]
        for channel in channels:
            async with channel:
                with pytest.raises(Unavailable):
                    await fetch(channel)


@asynchronous
async def test_an_impostor_is_not_called(tmp_path: Path, theirs: CertificateFolder) -> None:
    """A server whose certificate has another role, or another authority's signature, gets no message."""
    folder = made(tmp_path / "ours")
    for impostor in (peers(folder, WORKER), peers(theirs, SCHEDULER, ca=folder)):
        async with (
            listening(impostor, GATEWAY) as address,
            peers(folder, GATEWAY).channel(address, SCHEDULER) as channel,
        ):
            with pytest.raises(Unavailable):
                await fetch(channel)


@asynchronous
async def test_renewal_needs_no_restart(tmp_path: Path, theirs: CertificateFolder) -> None:
    """New files, even of another authority: new connections use them, open streams continue, the old ones are refused."""
    folder, old = made(tmp_path / "ours"), CertificateFolder(tmp_path / "old")
    old.path.mkdir()
    for file in folder.path.iterdir():
        (old.path / file.name).write_bytes(file.read_bytes())
    async with (
        listening(peers(folder, SCHEDULER), GATEWAY) as address,
        peers(folder, GATEWAY).channel(address, SCHEDULER) as channel,
    ):
        stream = await attach(channel)
        for file in theirs.path.iterdir():
            (folder.path / file.name).write_bytes(file.read_bytes())
        assert await fetch(channel) > 0
        async with peers(old, GATEWAY, ca=folder).channel(address, SCHEDULER) as late:
            with pytest.raises(Unavailable):
                await fetch(late)
        await stream.write(engine_pb2.FrontendMessage(goodbye=engine_pb2.Goodbye()))
        with pytest.raises(grpc.aio.AioRpcError, match="broken off by the test"):
            await stream.read()


def test_certificates_that_are_half_written_change_nothing(
    ours: CertificateFolder, caplog: pytest.LogCaptureFixture
) -> None:
    """The last sound pair stays in force, and the log says why; without one there is no start."""
    files = tls.TlsFiles(ours.cert("ca"), ours.cert(GATEWAY), ours.key(GATEWAY))
    watched = tls.WatchedFiles(files)
    before = watched.current()
    ours.cert(GATEWAY).write_bytes(ours.cert(WORKER).read_bytes())  # the key is another's now
    assert watched.current() is before
    assert "stay in force" in caplog.text
    ours.key(GATEWAY).write_bytes(ours.key(WORKER).read_bytes())
    assert watched.current() is not before
    ours.key(GATEWAY).write_bytes(b"-----BEGIN")
    assert watched.current() is watched.current()
    with pytest.raises(ConfigError, match="quire certs DIR"):
        tls.WatchedFiles(files)


def test_making_certificates_again_keeps_the_authority(ours: CertificateFolder) -> None:
    """Renewal: what trusts the CA trusts the new ones; keys are for their owner alone."""
    ca, cert = ours.cert("ca").read_bytes(), ours.cert(GATEWAY).read_bytes()
    make_certificates(ours, hosts=["gateway.example"])
    assert ours.cert("ca").read_bytes() == ca
    assert ours.cert(GATEWAY).read_bytes() != cert
    assert {ours.key(name).stat().st_mode & 0o777 for name in ("ca", *NAMES)} == {0o600}


@asynchronous
async def test_the_http_door_follows_its_files(tmp_path: Path, theirs: CertificateFolder) -> None:
    """With a client CA, clients without a certificate are refused; renewed files count from the next handshake."""
    folder = made(tmp_path / "ours")
    context = tls.server_context(tls.TlsFiles(folder.cert("ca"), folder.cert(GATEWAY), folder.key(GATEWAY)))
    server = await asyncio.start_server(_greet, "127.0.0.1", 0, ssl=context)
    port = server.sockets[0].getsockname()[1]
    async with server:
        assert await _greeting(port, _client_context(folder, CLIENT)) == b"hello"
        for stranger in (_client_context(folder, None), _client_context(theirs, CLIENT, ca=folder)):
            with pytest.raises((ssl.SSLError, ConnectionError)):
                await _greeting(port, stranger)
        before = _client_context(folder, CLIENT)
        for file in theirs.path.iterdir():
            (folder.path / file.name).write_bytes(file.read_bytes())
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await _greeting(port, before)
        assert await _greeting(port, _client_context(theirs, CLIENT)) == b"hello"


async def _greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        writer.write(b"hello")
        await writer.drain()
        writer.close()


async def _greeting(port: int, context: ssl.SSLContext) -> bytes:
    """What the server says first; under TLS 1.3 a client learns only then that it was refused."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    try:
        said = await reader.read(5)
    finally:
        writer.close()
    if not said:
        raise ConnectionError("nothing was said")
    return said


def _client_context(folder: CertificateFolder, name: str | None, ca: CertificateFolder | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=(ca or folder).cert("ca"))
    if name is not None:
        context.load_cert_chain(folder.cert(name), folder.key(name))
    return context


@asynchronous
async def test_the_health_probe_speaks_tls(tmp_path: Path) -> None:
    """For containers: exit status 0 with certificates, 1 without, 2 for files of no use."""
    folder = made(tmp_path / "ours")
    async with listening(peers(folder, SCHEDULER), GATEWAY) as address:
        files = [
            "--tls-ca",
            str(folder.cert("ca")),
            "--tls-cert",
            str(folder.cert(CLIENT)),
            "--tls-key",
            str(folder.key(CLIENT)),
        ]
        assert await asyncio.to_thread(health_probe.main, [address, *files]) == 0
        assert await asyncio.to_thread(health_probe.main, [address, "", *files, "--tls-name", SCHEDULER]) == 0
        assert await asyncio.to_thread(health_probe.main, [address, *files, "--tls-name", WORKER]) == 1
        assert await asyncio.to_thread(health_probe.main, [address]) == 1
        assert await asyncio.to_thread(health_probe.main, [address, "--tls-ca", str(tmp_path / "none.pem")]) == 2


# --- settings ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "localhost", "LOCALHOST", "::1", "[::1]"])
def test_plain_text_on_this_machine(host: str) -> None:
    """Loopback needs no option."""
    Peers(PeerSettings()).check(f"{host}:1", WORKER)
    tls.refuse_plain_text(tls.host_of("unix:/tmp/socket"), what="listening on", instead="nothing")


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "10.0.0.7", "worker", "[::]", "127.example.com", "127.0.0.1.example.com", ""]
)
def test_plain_text_does_not_leave_it(host: str) -> None:
    """Listening and calling: ConfigError that says what to do; --insecure allows it."""
    plain, allowed = Peers(PeerSettings()), Peers(PeerSettings(insecure=True))
    with pytest.raises(ConfigError, match=r"--peer-ca.*--insecure"):
        plain.check(f"{host}:1", WORKER)
    with pytest.raises(ConfigError, match=r"--peer-ca.*--insecure"):
        plain.bind(grpc.aio.Server, host, 0, option="--port")  # type: ignore[arg-type]
    allowed.check(f"{host}:1", WORKER)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"ca": Path("a")}, "go together"),
        ({"ca": Path("a"), "cert": Path("b")}, "go together"),
        ({"names": ("gateway=x",)}, "says nothing without"),
        ({"ca": Path("a"), "cert": Path("b"), "key": Path("c"), "names": ("broker=x",)}, "ROLE=NAME"),
        ({"ca": Path("a"), "cert": Path("b"), "key": Path("c"), "names": ("gateway=",)}, "ROLE=NAME"),
    ],
)
def test_options_that_do_not_fit(values: dict[str, object], said: str) -> None:
    """Half a set of files never means plain text by mistake."""
    with pytest.raises(ConfigError, match=said):
        PeerSettings.of(**values)


def test_door_options_that_do_not_fit() -> None:
    """The same at the users' doors."""
    for values in ({"cert": Path("a")}, {"key": Path("a")}, {"client_ca": Path("a")}):
        with pytest.raises(ConfigError, match="--tls-cert and --tls-key"):
            DoorSettings.of(**values)


def test_which_name_is_expected_where(ours: CertificateFolder) -> None:
    """One name: that one at any address. Several: the one that equals the address' host, or none."""
    files = {"ca": ours.cert("ca"), "cert": ours.cert(SCHEDULER), "key": ours.key(SCHEDULER)}
    assert PeerSettings.of(**files).name_at(WORKER, "10.0.0.7") == WORKER
    several = PeerSettings.of(**files, names=("worker=w-0", "worker=w-1", "gateway=spiffe://quire/gateway"))
    assert several.name_at(WORKER, "w-1") == "w-1"
    with pytest.raises(ConfigError, match="several are given"):
        several.name_at(WORKER, "10.0.0.7")
    assert several.names_of(GATEWAY) == ("spiffe://quire/gateway",)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """asyncio tells of handshakes that fail, which these tests mean."""
    log = logging.getLogger("asyncio")
    level = log.level
    log.setLevel(logging.CRITICAL)
    yield
    log.setLevel(level)
