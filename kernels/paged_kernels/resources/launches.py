"""Launches of Triton kernels, written down instead of run, with what a compilation of them needs."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

_TYPES = {
    torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int64: "i64",
    torch.int32: "i32", torch.uint8: "u8", torch.int8: "i8",
}  # fmt: skip


@dataclass(frozen=True)
class Launch:
    """A kernel, its arguments by name, and its options."""

    kernel: triton.JITFunction
    arguments: dict[str, Any]
    options: dict[str, Any]

    @property
    def name(self) -> str:
        """Name of the kernel."""
        return str(self.kernel.__name__)

    def compile(self, target: GPUTarget) -> CompiledKernel:
        """The kernel as Triton would compile it for this launch on that GPU."""
        signature, constants, attributes = {}, {}, {}
        for i, parameter in enumerate(self.kernel.params):
            value = self.arguments[parameter.name]
            if parameter.is_constexpr:
                signature[parameter.name], constants[parameter.name] = "constexpr", value
            else:
                signature[parameter.name] = _type_of(value)
                if _divisible(value):
                    attributes[i,] = [["tt.divisibility", 16]]
        source = ASTSource(self.kernel, signature, constants, attributes)
        return triton.compile(source, target=target, options=self.options)


@contextmanager
def launches() -> Iterator[list[Launch]]:
    """Inside, kernels are not launched but written down."""
    found: list[Launch] = []
    usual = triton.JITFunction.run

    def run(kernel: triton.JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        names = [parameter.name for parameter in kernel.params]
        arguments = dict(zip(names, args, strict=False))
        arguments |= {name: options.pop(name) for name in list(options) if name in names}
        found.append(Launch(kernel, arguments, options))

    triton.JITFunction.run = run
    try:
        yield found
    finally:
        triton.JITFunction.run = usual


def _type_of(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return "*" + _TYPES[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


def _divisible(value: object) -> bool:
    """What Triton finds out about arguments when it launches."""
    if isinstance(value, torch.Tensor):
        return value.data_ptr() % 16 == 0
    return isinstance(value, int) and value % 16 == 0
