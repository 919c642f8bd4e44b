"""Builds of the CPU kernels that wheels carry, and the best one for a processor.

`deploy/kernels.py` makes them from the sources in `cpu`; an installation may have built libraries in
`cpu_prebuilt`.
"""

from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).with_name("cpu")
PREBUILT = Path(__file__).with_name("cpu_prebuilt")
# -ffp-contract=fast fuses every a * b + c alike; without -ffast-math the compiler keeps the written order of
# sums.
FLAGS = ("-std=c++17", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fno-exceptions", "-fno-rtti", "-fPIC")
_AVX2 = frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2", "movbe", "abm"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}


@dataclass(frozen=True, slots=True)
class Build:
    """`cpu`: compile target, as Zig names it. `needed`: processor features, as /proc/cpuinfo names them."""

    machine: str
    name: str
    cpu: str
    needed: frozenset[str] = frozenset()

    @property
    def file_name(self) -> str:
        """File name of the built library."""
        return f"{self.machine}-{self.name}.so"


BUILDS = (
    Build("x86_64", "avx512_bf16", "x86_64_v4+avx512bf16+avx512vnni", _AVX512 | {"avx512_bf16", "avx512_vnni"}),
    Build("x86_64", "avx512", "x86_64_v4", _AVX512),
    Build("x86_64", "avx2", "x86_64_v3", _AVX2),
    Build("aarch64", "neon", "generic"),
)
"""Best first."""


def runnable(machine: str, features: Set[str]) -> list[Build]:
    """Builds that a processor can run, best first."""
    return [build for build in BUILDS if build.machine == machine and build.needed <= features]
