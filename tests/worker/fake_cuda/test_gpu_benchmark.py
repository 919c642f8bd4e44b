"""Parts of `python -m benchmarks.gpu` on the fake device; the whole of it runs in tests/benchmarks/test_gpu_benchmark.py."""

import time

import pytest

from benchmarks.gpu.clock import Bench
from benchmarks.gpu.kernels import Kernels, installed_libraries
from tests.support.attention_packages import attention_packages
from tests.worker.fake_cuda.device import FakeDevices
from tests.worker.fake_cuda.tensors import DEVICE

__all__ = ["attention_packages"]


def test_what_has_no_time_is_named():
    """Behind the deadline nothing new begins, and each thing left out is said."""
    bench = Bench(DEVICE, 0.0, tiny=True)
    Kernels(bench, FakeDevices().cuda(0)).run()
    assert bench.figures == []
    assert len(bench.skipped) > 10
    assert all("out of time" in line for line in bench.skipped if "FA3" not in line)  # vLLM is not installed


@pytest.mark.long
def test_libraries_have_rows(attention_packages):
    """Beside Triton's: where they take the shape, and the step."""
    bench = Bench(DEVICE, time.monotonic() + 300, tiny=True)
    bench.measure_ceilings()
    Kernels(bench, FakeDevices().cuda(0), installed_libraries(bench.skipped)).run()
    rows = [figure.name for figure in bench.figures if "attention" in figure.name]
    assert rows == [
        *["decode attention", "decode attention, flash-attn-3"] * 2,
        *("prefill attention", "prefill attention, flash-attn-3", "prefill attention, torch"),
    ]
    assert bench.skipped[0] == "flashinfer takes head sizes of 64, 128 or 256, not 32"
    assert all("FA3" in line for line in bench.skipped[1:])
