"""Ranks on CUDA devices: sums by NCCL within modules and recorded steps; steps in flight; the ends of a group."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from paged_kernels import ranks
from svc_common.errors import ConfigError
from tests.support.checkpoints import make_checkpoint
from tests.support.worker.driver import Driver, generate
from tests.support.worker.rank_group import RunningGroup, joining, running, settings_of
from tests.support.worker.rank_runs import check, check_chunks, check_swaps_and_prefixes, prompts
from tests.worker.fake_cuda import process
from tests.worker.fake_cuda.recorder import RECORDER
from worker_svc.device.choice import choose_device
from worker_svc.device.devices import CudaDevices
from worker_svc.engine import DeviceLost


@pytest.fixture(scope="module", autouse=True)
def _fake() -> Iterator[None]:
    """Devices of this process, and of the ranks that it starts, are fake."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("num_cuda", "cuda"):
            patch.setattr(CudaDevices, name, getattr(CudaDevices, name))
        process.take_over()
        patch.setenv("PYTHONPATH", process.environment(os.environ)["PYTHONPATH"])
        yield


@contextmanager
def on_devices(path: Path, size: int, **settings: Any) -> Iterator[RunningGroup]:
    with running(path, size, device="cuda", dtype="float32", max_model_len=256, **settings) as group:
        yield group


@pytest.mark.long
def test_recorded_steps_contain_sums(tmp_path: Path) -> None:
    """R18: tokens of recorded decode steps over two ranks, whose head is divided too, are those of `generate`."""
    path = make_checkpoint("llama", tmp_path / "llama", num_hidden_layers=1)
    with on_devices(path, 2) as group:
        assert group.own._loaded.model.is_fused and RECORDER.num_recorded
        assert group.own._loaded.shard.size == 2
        driver, before = Driver(group), group.own._ranks.num_transfers
        generate(driver, "a", prompts()[1], 5)
        check(driver, path, {"a": prompts()[1]})
        # A prompt has two sums in its layer, and the gathered logits; what is recorded is not counted again.
        assert group.own._ranks.num_transfers - before < 5
        assert not group.losses


@pytest.mark.long
@pytest.mark.parametrize("family", ["llama", "qwen3", "mixtral"])
def test_tokens_of_modules_on_devices(family: str, tmp_path: Path) -> None:
    """Chunks, late arrivals, swaps and shared prefixes, with kernels in plain torch."""
    path = make_checkpoint(family, tmp_path / family)
    with on_devices(path, 2, backend="reference") as group:
        check_chunks(Driver(group), path)
        check_swaps_and_prefixes(Driver(group), path)
        assert not group.losses


@pytest.mark.long
def test_a_lost_rank_ends_the_group(tmp_path: Path) -> None:
    """Also while a step is in flight."""
    path = make_checkpoint("llama", tmp_path / "llama")
    with on_devices(path, 2, backend="reference", rank_timeout_s=20) as group:
        driver = Driver(group)
        generate(driver, "a", prompts()[0], 2)
        group.followers[0].kill()
        with pytest.raises(DeviceLost, match="has ended"):
            generate(driver, "b", prompts()[1], 2)


@pytest.mark.long
def test_a_torch_without_nccl_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before weights are read, with what to do."""

    def missing(*_given: object, **_more: object) -> None:
        raise RuntimeError("this torch is built without NCCL")

    monkeypatch.setattr(ranks, "nccl", missing)
    path = make_checkpoint("llama", tmp_path / "llama")
    message = r"rank 0 on cuda:0 cannot sum .* built without NCCL; each rank needs a GPU of its own"
    with joining(settings_of(path, 2, device="cuda")) as group, pytest.raises(ConfigError, match=message):
        group.load(lambda _stage, _fraction: None)


def test_ranks_take_the_devices_in_turn(tmp_path: Path) -> None:
    """Without a number; with one they take that."""

    class Three:
        def num_cuda(self) -> int:
            return 3

        def cuda(self, index: int) -> Any:
            return index

    path = make_checkpoint("llama", tmp_path / "llama")
    for device, found in (("auto", [0, 1, 2, 0]), ("cuda", [0, 1, 2, 0]), ("cuda:1", [1, 1, 1, 1])):
        settings = [settings_of(path, 4, device=device)] + [
            settings_of(path, 4, device=device, rank=rank, leader="a:1") for rank in (1, 2, 3)
        ]
        assert [choose_device(given, Three()) for given in settings] == found


@pytest.mark.long
def test_stages_on_devices_are_refused(tmp_path: Path) -> None:
    """By name."""
    path = make_checkpoint("llama", tmp_path / "llama")
    message = "--pipeline-parallel 2 runs on the CPU only, and the device is cuda:0"
    with (
        joining(settings_of(path, 1, pipeline_parallel=2, device="cuda")) as group,
        pytest.raises(ConfigError, match=message),
    ):
        group.load(lambda _stage, _fraction: None)
