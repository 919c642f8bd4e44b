"""`python -m tests.shares quick|test|long [options of pytest]`: runs the tests in shares beside each other, and prints their time.

Each share is a process of its own: while the tests of one wait for services that they started, those of another compute.
"""

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_LOGS = ROOT / ".venv"
_NO_TESTS = 5
# Two more than processors: some tests wait. More shares at once cost processor time (eight instead of two: a fifth) and make slow
# tests slower.
_AT_ONCE = (os.cpu_count() or 1) + 2

# Folders and patterns of files by share. A file that one share lists is not in another that lists its folder. A share without a
# list has all tests that are in no list; its output is shown at once.
QUICK = {
    "core": ("tests/core/test_[a-o]*.py", "tests/core/parts", "tests/golden"),
    "properties": ("tests/core/test_[p-z]*.py", "tests/core/policies", "tests/block_manager"),
    "gateway": ("tests/gateway",),
}
# Begun in this order: long ones, and those that wait for services, first. torch, which takes seconds to import, is imported by
# "e2e", "device", "ranks", "engine" and "kernels" alone.
ALL = {
    "e2e": ("tests/e2e",),
    "device": ("tests/worker/test_fake_cuda.py",),
    "ranks": ("tests/worker/ranks",),
    "engine": ("tests/worker/engine", "tests/worker/model", "tests/worker/adapters"),
    "kernels": (
        *("tests/kernels", "tests/worker", "tests/quire/offline"),
        *("tests/benchmarks/test_gpu_benchmark.py", "tests/benchmarks/test_perplexity.py"),
        *("tests/benchmarks/compare/test_compare_workloads.py", "tests/quire_tools/test_cli_doctor.py"),
        *("tests/quire_tools/test_cli_convert.py", "tests/quire_tools/test_cli_plan.py"),
        *("tests/gateway/text/test_chat_families.py", "tests/gateway/text/test_chat_template.py"),
    ),
    "scheduler": ("tests/scheduler", "tests/quire_tools/replay", "tests/quire_tools/simulation"),
    "quire": (),
    "gateway": ("tests/gateway",),
    "benchmarks": ("tests/benchmarks", "tests/traces", "tests/fuzz"),
    "tree": ("tests/repo", "tests/svc_common", "tests/install", "tests/simulation"),
    "core": ("tests/core", "tests/block_manager", "tests/golden"),
}
# What long tests of "e2e" start serves one test or file, so they can be in several shares.
SPLIT = {
    "families": ("tests/e2e/test_equality.py", "tests/e2e/test_families_killed.py"),
    "groups": ("tests/e2e/test_*ranks.py", "tests/e2e/test_stages.py", "tests/e2e/test_worker*.py"),
    **ALL,
}
LONG = "long"
TIERS = {
    "quick": (QUICK, "not long and not soak and not processes"),
    "test": (ALL, "not long and not soak"),
    "long": (SPLIT, f"{LONG} and not soak"),
}
Shares = Mapping[str, Sequence[str]]


def arguments(share: str, shares: Shares) -> list[str]:
    """What pytest collects for a share, but for what another share lists below it."""
    listed = {name: [path for pattern in shares[name] for path in sorted(ROOT.glob(pattern))] for name in shares}
    own = listed.pop(share)
    others = [path for paths in listed.values() for path in paths]
    below = [path for path in others if not own or set(own) & set(path.parents)]
    return [str(path.relative_to(ROOT)) for path in own] + [f"--ignore={path.relative_to(ROOT)}" for path in below]


def run(shares: Shares, expression: str, options: Sequence[str]) -> tuple[bool, str]:
    """Run all shares with the tests whose marks fit `expression`. Returns whether no test failed, and each share's seconds."""
    # With kept bytecode a service starts in two thirds of the processor time.
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    # The shares keep all processors busy; threads of each would wait for each other.
    environ.setdefault("OMP_NUM_THREADS", "1")
    start, running, seconds, good = time.monotonic(), dict[str, subprocess.Popen[bytes]](), dict[str, float](), True
    logs, pending = {share: _LOGS / f"tests-{share}.txt" for share in shares if shares[share]}, list(shares)
    while pending or running:
        while pending and len(running) < _AT_ONCE:
            share = pending.pop(0)
            told = ["--durations=8"] if expression.startswith(LONG) else []
            command = [sys.executable, "-m", "pytest", "-m", expression, *told, *arguments(share, shares), *options]
            with logs[share].open("wb") if share in logs else open(1, "wb", closefd=False) as output:
                running[share] = subprocess.Popen(
                    command, cwd=ROOT, env=environ, stdout=output, stderr=subprocess.STDOUT
                )
        time.sleep(0.05)
        for share in [share for share, process in running.items() if process.poll() is not None]:
            seconds[share] = time.monotonic() - start
            good &= running.pop(share).returncode in (0, _NO_TESTS)
    for share, log in logs.items():
        print(
            f"\nbeside it, {share} ({' '.join(shares[share])}):\n{log.read_text(encoding='utf-8', errors='replace')}",
            end="",
        )
    return good, ", ".join(f"{share} {number:.0f}" for share, number in seconds.items())


def main() -> int:
    """The command."""
    if len(sys.argv) < 2 or sys.argv[1] not in TIERS:
        print(__doc__)
        return 2
    tier, start = sys.argv[1], time.monotonic()
    good, seconds = run(*TIERS[tier], sys.argv[2:])
    print(f"\n{tier}: {'passed' if good else 'FAILED'} in {time.monotonic() - start:.0f} s ({seconds})")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
