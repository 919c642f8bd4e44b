"""Faults put into the scheduler core on purpose, each of which a quick test must notice: `python -m tests.mutants [NAME ...]`.

Each runs on a copy of the packages in a temporary folder. Survivors are printed, and the exit status is their number.
"""

import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
COPIED = ("block_manager", "scheduler_svc", "svc_common", "protos", "tests", "pyproject.toml")
CORE = "scheduler_svc/core"
STATES = "block_manager/rules/state_tables.py"
OF_STATES = "tests/block_manager/rules/test_state_tables.py"
ROWS = "tests/core/test_fast_path.py"
NOT_COPIED = shutil.ignore_patterns(
    "__pycache__", "*.json", "fuzz", "compose", "clients", "e2e", "lab", "gateway", "quire"
)


@dataclass(frozen=True, slots=True)
class Mutant:
    """One fault: in the file `path` the text `old`, which is there once, becomes `new`; a test of `tests` fails then."""

    name: str
    path: str
    old: str
    new: str
    tests: str = "tests/core/test_corner_decisions.py"


_MOVES = "tests/core/test_live_move.py"
MUTANTS = (
    Mutant("withdrawn", f"{CORE}/policies/mixed/mixed.py", "builder.budget.give_back(sum(withdrawn))", "pass"),
    Mutant("ties-of-victims", f"{CORE}/parts/preemption.py", "-group.ticket", "group.ticket"),
    Mutant("ties-of-those-that-make-way", f"{CORE}/policies/mixed/rank_preemption.py", "-g.ticket", "g.ticket"),
    Mutant(
        "ties-in-order",
        f"{CORE}/parts/preemption.py",
        "return max(candidates, key=self._ordering.key)",
        "return max(reversed(candidates), key=self._ordering.key)",
    ),
    Mutant("may-resume", f"{CORE}/parts/progress.py", "return not sequence.num_placeholders", "return True"),
    Mutant(
        "may-resume-unasked", f"{CORE}/policies/mixed/mixed.py", "if not self._progress.may_resume(first):", "if False:"
    ),
    Mutant(
        "ticket-order-of-loose-rows",
        f"{CORE}/parts/step_shares.py",
        "(left <= 0 or group.ticket < int(rows.tickets[-1]))",
        "left <= 0",
    ),
    Mutant("affinity-tie", f"{CORE}/policies/chitu/affinity.py", "(known[rank], -num_owned[rank])", "known[rank]"),
    Mutant("affinity-tie-turned", f"{CORE}/policies/chitu/affinity.py", "-num_owned[rank])", "num_owned[rank])"),
    Mutant(
        "watermark-of-room-made",
        f"{CORE}/policies/mixed/rank_preemption.py",
        "needed + (state.cache.watermark_blocks if groups else 0) <= free",
        "needed <= free",
    ),
    Mutant(
        "watermark-of-room-there",
        f"{CORE}/policies/mixed/rank_preemption.py",
        "needed + state.cache.watermark_blocks <= state.cache.num_free_gpu",
        "needed <= state.cache.num_free_gpu",
    ),
    Mutant("dependants-go-on", f"{CORE}/lost_work.py", "    send_back(later, state, flights)\n", ""),
    Mutant("dependants-in-flight", f"{CORE}/plans_in_flight.py", "group.sequences[0].name in names\n", "False\n"),
    Mutant(
        "dependants-swapped",
        f"{CORE}/plans_in_flight.py",
        "or group.request.request_id in moved\n",
        "\n",
        "tests/core/policies/mixed/test_quire_preemption.py",
    ),
    Mutant(
        "peak-half-blocks",
        f"{CORE}/parts/admission_forecast.py",
        "besides = tables.num_besides * width",
        "besides = 0 * width",
    ),
    Mutant(
        "peak-freed-blocks",
        f"{CORE}/parts/admission_forecast.py",
        "num_used + grown - gone",
        "num_used + grown",
    ),
    Mutant("peak-bound", f"{CORE}/parts/admission_forecast.py", "if peak <= capacity:", "if peak <= capacity + 1:"),
    Mutant("caution-never-rises", f"{CORE}/parts/admission_forecast.py", "self._caution + _RISE", "self._caution"),
    Mutant(
        "caution-never-falls",
        f"{CORE}/parts/admission_forecast.py",
        "self._caution - _FALL * num_ended",
        "self._caution",
    ),
    Mutant(
        "caution-unbounded",
        f"{CORE}/parts/admission_forecast.py",
        "min(_MOST_CAUTION, self._caution + _RISE)",
        "self._caution + _RISE",
    ),
    Mutant(
        "stuck-check-on-every-lane", f"{CORE}/workers/worker_group.py", "        if is_last:\n", "        if True:\n"
    ),
    Mutant(
        "stuck-check-never",
        f"{CORE}/workers/worker_group.py",
        "        if is_last:\n",
        "        if False:\n",
        "tests/core/policies/chitu/test_chitu_repairs.py",
    ),
    Mutant("moved-but-kept", f"{CORE}/workers/live_move.py", "    source.drop(group)\n", "", _MOVES),
    Mutant(
        "swap-in-need",
        f"{CORE}/policies/mixed/swap_in.py",
        "state.cache.num_blocks_to_swap_in(group.live)",
        "len(group.live)",
    ),
    Mutant(
        "swap-in-need-of-v0",
        f"{CORE}/policies/vllm_v0/swapped.py",
        "state.cache.num_blocks_to_swap_in(group.live, num_lookahead)",
        "state.cache.num_blocks_to_swap_in(group.live)",
    ),
    Mutant("states-are-shared", STATES, "bool(table) and", "not table and", OF_STATES),
    Mutant(
        "windows-of-rows",
        f"{CORE}/fast_decode/rows.py",
        "_before[here] >= self.frees_at",
        "_before[here] > self.frees_at",
        ROWS,
    ),
    Mutant("blocks-of-rows", f"{CORE}/fast_decode/rows.py", "self.held[rows] -= np.take(num_freed, at)", "pass", ROWS),
    Mutant(
        "checkpoints-of-rows", f"{CORE}/fast_decode/blocks.py", "if step and self._rows.members:", "if False:", ROWS
    ),
    Mutant(
        "checkpoints-in-flight",
        f"{CORE}/fast_decode/blocks.py",
        "not (keeps or self._cache",
        "not (keeps and self._cache",
        ROWS,
    ),
    Mutant("checkpoint-in-place", STATES, "            self._unregister(checkpoint)\n", "", OF_STATES),
    Mutant("checkpoints-read-early", STATES, "(*moves.to_keep, *moves.to_read)", "(*moves.to_keep,)", OF_STATES),
    Mutant("checkpoints-of-failed-steps", STATES, "while (block := self._pool", "if (block := self._pool", OF_STATES),
    Mutant("checkpoints-that-were-lost", STATES, "elif self._drop_unnamed(kept) and", "elif", OF_STATES),
    Mutant("states-in-needs", STATES, "self.num_blocks * num_sequences + ", "", OF_STATES),
)


def survives(mutant: Mutant) -> bool:
    """Whether its tests pass with the fault."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, copy / name, ignore=NOT_COPIED)
            else:
                shutil.copy(source, copy / name)
        path = copy / mutant.path
        text = path.read_text(encoding="utf-8")
        if text.count(mutant.old) != 1:
            raise SystemExit(
                f"{mutant.name}: {mutant.path} has {mutant.old!r} {text.count(mutant.old)} times, not once"
            )
        path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *mutant.tests.split()]
        done = subprocess.run(command, cwd=copy, capture_output=True, text=True, check=False)
        if done.returncode not in (0, 1):
            raise SystemExit(f"{mutant.name}: the tests could not run:\n{done.stdout}{done.stderr}")
        return done.returncode == 0


def main(names: list[str]) -> int:
    """The number of survivors."""
    chosen = [mutant for mutant in MUTANTS if not names or mutant.name in names]
    survivors = 0
    for mutant in chosen:
        survived = survives(mutant)
        survivors += survived
        print(f"{'SURVIVED' if survived else 'noticed':9} {mutant.name}", flush=True)
    print(f"{len(chosen) - survivors} of {len(chosen)} faults were noticed")
    return survivors


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
