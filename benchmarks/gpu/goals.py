"""The goals K1 to K6 and E1 to E12: which figures each is read from, and what it should be. Arithmetic only.

All are ratios of figures of one run, or shares of ceilings measured in it; the few absolute times are for an H200.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Figures = Mapping[tuple[str, str], Mapping[str, Any]]
Read = Callable[[Figures], float | None]


@dataclass(frozen=True, slots=True)
class Goal:
    """One row of the table. `at_most`: the value should not exceed the goal; else it should reach it."""

    id: str
    what: str
    read: Read
    goal: float
    at_most: bool = False

    def row(self, figures: Figures) -> dict[str, Any]:
        """With the value, None if it was not measured, and whether the goal is met."""
        value = self.read(figures)
        met = None if value is None else value <= self.goal if self.at_most else value >= self.goal
        return {
            "id": self.id,
            "what": self.what,
            "value": value,
            "goal": self.goal,
            "at_most": self.at_most,
            "met": met,
        }


def _share(name: str, shape: str) -> Read:
    return lambda figures: figures[name, shape]["share"] if (name, shape) in figures else None


def _us(name: str, shape: str) -> Read:
    return lambda figures: figures[name, shape]["us"] if (name, shape) in figures else None


def _faster(mine: tuple[str, str], other: tuple[str, str]) -> Read:
    """How many times as fast the first is."""
    return lambda figures: figures[other]["us"] / figures[mine]["us"] if mine in figures and other in figures else None


def _worst(*reads: Read) -> Read:
    def read(figures: Figures) -> float | None:
        values = [value for one in reads if (value := one(figures)) is not None]
        return min(values) if len(values) == len(reads) else None

    return read


def _busy(figures: Figures) -> float | None:
    """Share of the time that the worker's device computes while many sequences decode."""
    shares = [1 - 1 / row["share"] for (name, _), row in figures.items() if name == "worker idle between steps"]
    return min(shares) if shares else None


def _any_us(name: str) -> Read:
    return lambda figures: min((row["us"] for (found, _), row in figures.items() if found == name), default=None)


_FA3 = "attention, vllm's FA3"
_B32_4K, _B32_1K, _B1_4K = "b32 x 4096", "b32 x 1024", "b1 x 4096"
_DRAW = "b128, V 131072"
_STEP = "decode step"

GOALS: Sequence[Goal] = (
    Goal("K1", "decode attention, 32 x 4k, share of copy", _share("decode attention", _B32_4K), 0.90),
    Goal("K1", "the same / FA3 of vLLM's wheel", _faster(("decode attention", _B32_4K), (f"decode {_FA3}", _B32_4K)), 1.0),
    Goal("K2", "decode attention, 32 x 1k, us", _us("decode attention", _B32_1K), 41, at_most=True),
    Goal("K2", "decode attention, 1 x 4k, us", _us("decode attention", _B1_4K), 14, at_most=True),
    Goal("K2", "32 x 1k / FA3 of vLLM's wheel", _faster(("decode attention", _B32_1K), (f"decode {_FA3}", _B32_1K)), 1.0),
    Goal("K3", "prefill attention, 8k, share of products", _share("prefill attention", "8192 tokens"), 0.73),
    Goal(
        "K3", "the same / FA3 of vLLM's wheel", _faster(("prefill attention", "8192 tokens"), (f"prefill {_FA3}", "8192 tokens")),
        0.85,
    ),
    Goal("K4", "cache write, 8k tokens, share of copy", _share("cache write", "8192 tokens"), 0.90),
    Goal(
        "K4", "add and norm, gate, rotate and store, 8k tokens, least share of copy",
        _worst(*(_share(name, "8192 tokens") for name in ("add and norm", "gate", "rotate and store"))), 0.90,
    ),
    Goal("K4", "add and norm, 128 tokens, us", _us("add and norm", "128 tokens"), 2.5, at_most=True),
    Goal("K5", "swap out, share of pinned copy", _share("swap out", "256 blocks"), 0.95),
    Goal("K5", "swap in, share of pinned copy", _share("swap in", "256 blocks"), 0.95),
    Goal("K6", "top-k and top-p, 128 rows, us", _us("sampling, top-k and top-p", _DRAW), 270, at_most=True),
    Goal("K6", "greedy, 128 rows, share of reading them once", _share("sampling, greedy", _DRAW), 0.67),
    Goal("E1", "8 B step, 1 x 1k, share of floor", _share(_STEP, "8B b1 x 1024"), 0.85),
    Goal("E2", "8 B step, 32 x 1k", _share(_STEP, "8B b32 x 1024"), 0.85),
    Goal("E2", "8 B step, 128 x 1k", _share(_STEP, "8B b128 x 1024"), 0.85),
    Goal("E2", "8 B step, 256 x 1k", _share(_STEP, "8B b256 x 1024"), 0.83),
    Goal("E3", "nano-vllm's workload, 8 B, share of floor", _share("in one process", "8B nano"), 0.82),
    Goal("E4", "nano-vllm's workload, 0.6 B, share of floor", _share("in one process", "0.6B nano"), 0.77),
    Goal("E5", "0.6 B step, 1 x 1k, us", _us(_STEP, "0.6B b1 x 1024"), 850, at_most=True),
    Goal("E6", "first token of 1k, 8 B, share of floor", _share("first token", "8B 1024 tokens"), 0.82),
    Goal("E7", "share of time that the device computes, stack, 0.6 B", _busy, 0.99),
    Goal("E8", "schedule and prepare a step of the stack, us", _any_us("schedule and prepare a step"), 200, at_most=True),
    Goal("E9", "stack / one process, nano, 0.6 B", _faster(("over gRPC", "0.6B nano"), ("in one process", "0.6B nano")), 0.98),
    Goal(
        "E10", "modules / program, 0.6 B step, 32 x 1k",
        _faster((f"modules, {_STEP}", "0.6B b32 x 1024"), (_STEP, "0.6B b32 x 1024")), 0.97,
    ),
    Goal(
        "E11", "stack / transformers' continuous batching",
        _faster(("over gRPC", "0.6B even"), ("transformers' continuous batching", "0.6B even")), 5.0,
    ),
    Goal("E12", "FP8 weights and cache, 8 B step, 128 x 1k", _share(f"fp8 weights and cache, {_STEP}", "8B-fp8 b128 x 1024"), 0.75),
    Goal(
        "E12", "the same / bfloat16",
        _faster((f"fp8 weights and cache, {_STEP}", "8B-fp8 b128 x 1024"), (_STEP, "8B b128 x 1024")), 1.5,
    ),
)  # fmt: skip


def table(figures: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Every goal, measured or not."""
    found = {(row["name"], row["shape"]): row for row in figures}
    return [goal.row(found) for goal in GOALS]
