"""The examples in C++, Java and Rust, compiled from the protos and run against real services.

Each needs its compiler and gRPC library (the README beside each example names Debian's packages); what is not there is skipped.
"""

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from quire.client.sampling_params import SamplingParams
from quire.client.sync_client import Client
from quire.local_stack.stack import LocalStack

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
PROMPT = "Write a class."
COMPILE_TIMEOUT_S = 280

Command = list[str]


def _run(command: Sequence[str], timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"LC_ALL": "C"}
    return subprocess.run(
        command, capture_output=True, text=True, encoding="utf-8", timeout=timeout_s, check=False, env=environment
    )


def _compile(*commands: Sequence[str]) -> None:
    for command in commands:
        done = _run(command, COMPILE_TIMEOUT_S)
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"


def _need(*programs: str, files: Sequence[str] = ()) -> None:
    missing = [program for program in programs if shutil.which(program) is None]
    missing += [file for file in files if not Path(file).exists()]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)} (see the README of the example)")


def _cpp(folder: Path) -> Command:
    _need("cmake", "g++", "protoc", "grpc_cpp_plugin", "pkg-config")
    if _run(["pkg-config", "--exists", "grpc++"]).returncode:
        pytest.skip("not installed: libgrpc++ (see examples/cpp/README.md)")
    _compile(["cmake", "-S", str(EXAMPLES / "cpp"), "-B", str(folder)], ["cmake", "--build", str(folder)])
    return [str(folder / "quire_chat")]


def _java(folder: Path) -> Command:
    _need("java", "javac", "protoc", "grpc_java_plugin", files=["/usr/share/java/grpc-netty.jar"])
    _compile([str(EXAMPLES / "java" / "build.sh"), str(folder)])
    return ["java", "-cp", (folder / "classpath").read_text().strip(), "QuireChat"]


def _rust(folder: Path) -> Command:
    _need(
        "cargo", "protoc", files=["/usr/share/cargo/registry/h2-0.3.13", "/usr/share/cargo/registry/prost-build-0.11.6"]
    )
    source = EXAMPLES / "rust"
    options = ["--offline", "--config", str(source / "debian.toml"), "--manifest-path", str(source / "Cargo.toml")]
    _compile(["cargo", "build", *options, "--target-dir", str(folder)])
    return [str(folder / "debug" / "quire-chat")]


_LANGUAGES: dict[str, Callable[[Path], Command]] = {"cpp": _cpp, "java": _java, "rust": _rust}


@pytest.fixture(scope="module", params=_LANGUAGES)
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Command:
    """The command of one language's client."""
    return _LANGUAGES[request.param](tmp_path_factory.mktemp(request.param))


def test_a_streamed_chat_is_the_servers_text(program: Command, stack: LocalStack) -> None:
    """Any language from the protos alone. What arrives is a whole answer and its account."""
    done = _run([*program, stack.grpc_address, PROMPT, "24"])
    assert done.returncode == 0, done.stderr
    text, _, account = done.stdout.rpartition("\n[")
    with Client(stack.grpc_address) as client:
        num_prompt_tokens = client.chat(PROMPT, SamplingParams(max_tokens=1)).num_prompt_tokens
    assert account.startswith(f"{num_prompt_tokens} prompt + ")
    assert text.strip()


def test_a_gateway_that_is_gone_is_passed_over(program: Command, stack: LocalStack) -> None:
    """The next address is asked."""
    done = _run([*program, f"127.0.0.1:1,{stack.grpc_address}", PROMPT, "4"])
    assert (done.returncode, "4 output tokens" in done.stdout) == (0, True), done.stderr


def test_errors_say_their_reason(program: Command, stack: LocalStack) -> None:
    """Status, stable reason and the sentence for people, without google.rpc.Status at hand."""
    done = _run([*program, stack.grpc_address, PROMPT, "0"])
    assert done.returncode == 1
    assert "INVALID_FIELD: stop.max_tokens: is 0" in done.stderr


class _Refusal(grpc.GenericRpcHandler):
    """Answers every streaming call with one error, whose sentence gRPC must percent-encode."""

    SENTENCE = "Größe: 100 % 大き過ぎる"

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        return grpc.unary_stream_rpc_method_handler(self._refuse)

    def _refuse(self, request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        context.set_trailing_metadata((("x-error-reason", "INVALID_FIELD"),))
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, self.SENTENCE)
        yield b""


def test_a_sentence_in_any_script_arrives_whole(program: Command) -> None:
    """gRPC over HTTP/2: `grpc-message` is percent-encoded UTF-8; people read it decoded, whatever the locale."""
    server = grpc.server(ThreadPoolExecutor(1), handlers=(_Refusal(),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        done = _run([*program, f"127.0.0.1:{port}", PROMPT])
    finally:
        server.stop(None).wait()
    assert (done.returncode, f"INVALID_FIELD: {_Refusal.SENTENCE}" in done.stderr) == (1, True), done.stderr


def test_usage_is_explained(program: Command) -> None:
    """Without arguments."""
    done = _run(program)
    assert (done.returncode, "usage: " in done.stderr) == (2, True)
