"""The worker as a process of its own: signals, exit, ports; and settings that do not fit."""

import signal
import socket
import subprocess
import sys
from pathlib import Path

import grpc
import pytest

from protos.worker.v1 import worker_pb2, worker_pb2_grpc
from quire_tools.simulated_worker.settings import SimulatedWorkerSettings
from svc_common.errors import ConfigError
from worker_svc.settings import WorkerSettings

_SCRIPT = """
import asyncio, sys
from svc_common.errors import ConfigError
from quire_tools.simulated_worker.app import serve_simulated
from quire_tools.simulated_worker.settings import SimulatedWorkerSettings

settings = SimulatedWorkerSettings.of(port={port}, load_s={load_s})
try:
    asyncio.run(serve_simulated(settings, on_ready=lambda address: print(address, flush=True)))
except ConfigError as error:
    print(error, file=sys.stderr)
    sys.exit(2)
"""


def start(port: int = 0, load_s: float = 0.0) -> subprocess.Popen[str]:
    script = _SCRIPT.format(port=port, load_s=load_s)
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_the_process_in_order(number: signal.Signals) -> None:
    process = start()
    try:
        address = process.stdout.readline().strip()
        with grpc.insecure_channel(address) as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            assert [part.HasField("loaded") for part in stub.LoadModel(worker_pb2.LoadModelRequest())][-1]
        process.send_signal(number)
        _, stderr = process.communicate(timeout=40)
        assert (process.returncode, stderr) == (0, "")
    finally:
        process.kill()
        process.wait()


def test_signal_during_a_long_load_ends_the_process_soon() -> None:
    process = start(load_s=60)
    try:
        assert process.stdout.readline()
        process.terminate()
        _, stderr = process.communicate(timeout=40)
        assert (process.returncode, "Traceback" in stderr) == (0, False)
    finally:
        process.kill()
        process.wait()


def test_port_in_use_says_what_to_do_and_exits_with_2() -> None:
    """A port in use is a clear error."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        process = start(port)
        try:
            _, stderr = process.communicate(timeout=40)
        finally:
            process.kill()
    assert process.returncode == 2
    assert f"port {port} on 127.0.0.1 is in use" in stderr
    assert "--port" in stderr
    assert "Traceback" not in stderr


def test_settings_name_the_option_and_the_remedy(tmp_path: Path) -> None:
    missing = tmp_path / "nothing"
    with pytest.raises(ConfigError, match=r"--model: .*nothing does not exist; give the folder") as caught:
        WorkerSettings.of(model=missing)
    assert [v.field for v in caught.value.violations] == ["model"]
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is a file; give the folder"):
        WorkerSettings.of(model=tmp_path / "file")
    with pytest.raises(ConfigError, match="--device: 'tpu' is not a device"):
        WorkerSettings.of(model=tmp_path, device="tpu")
    with pytest.raises(ConfigError, match="--gpu-memory-utilization") as caught:
        WorkerSettings.of(model=tmp_path, gpu_memory_utilization=1.5, block_size=0, dtype="int4")
    assert {v.field for v in caught.value.violations} == {"gpu_memory_utilization", "block_size", "dtype"}
    with pytest.raises(ConfigError, match="--no-such"):
        SimulatedWorkerSettings.of(no_such=1)


def test_model_is_served_under_its_folders_name(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    folder.mkdir()
    assert WorkerSettings.of(model=folder).name == "tiny"
    assert WorkerSettings.of(model=folder, served_model_name="other").name == "other"
