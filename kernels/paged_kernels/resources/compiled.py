"""Kernels compiled for a GPU, and what they take of it, read from the compiled code."""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel

from paged_kernels.resources.launches import Launch


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU to compile for. `shared_bytes`: shared memory that one program may have."""

    target: GPUTarget
    shared_bytes: int


GPUS = {
    "sm_80": Gpu(GPUTarget("cuda", 80, 32), 163 * 1024),
    "sm_90": Gpu(GPUTarget("cuda", 90, 32), 227 * 1024),
    "gfx942": Gpu(GPUTarget("hip", "gfx942", 64), 64 * 1024),
}


@dataclass(frozen=True, slots=True)
class Resources:
    """What one program of a kernel takes.

    `registers`: of one thread. `spilled_bytes`: of one thread, in memory, because the registers are not enough.
    """

    registers: int
    spilled_bytes: int
    shared_bytes: int


def resources(launch: Launch, gpu: Gpu) -> Resources:
    """Compile a launch for a GPU and read what it takes."""
    made = launch.compile(gpu.target)
    read = _of_cubin if gpu.target.backend == "cuda" else _of_amdgcn
    registers, spilled_bytes = read(made)
    return Resources(registers, spilled_bytes, int(made.metadata.shared))


def _of_cubin(made: CompiledKernel) -> tuple[int, int]:
    """By cuobjdump, which comes with Triton. Its stack frame holds what is spilled."""
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernel.cubin")
        cubin.write_bytes(made.asm["cubin"])
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(cubin)]
        usage = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return _number(r"REG:(\d+)", usage), _number(r"STACK:(\d+)", usage)


def _of_amdgcn(made: CompiledKernel) -> tuple[int, int]:
    """From the metadata of the assembly. The private segment holds what is spilled."""
    text = str(made.asm["amdgcn"])
    return _number(r"\.vgpr_count:\s+(\d+)", text), _number(r"\.private_segment_fixed_size:\s+(\d+)", text)


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"{pattern} is not in what the compiler says: {text[:200]}")
    return int(found[1])
