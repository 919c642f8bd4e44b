"""Families of all kinds of caches through three processes, which are killed meanwhile: every token is that of `generate`.

In little room: prompts in chunks, swaps, recomputation, hits, copies of blocks and states; what was never written is NaN.
"""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e import tight_stacks
from tests.support.checkpoints import CACHE_FAMILIES, STATE_FAMILIES
from tests.support.stack import kill_requests, scheduler_kills
from tests.support.stack.commands import blocks
from tests.support.stack.kill_plan import Killer
from tests.support.stack.supervised import Readings, supervised
from tests.worker.families.tiny_checkpoints import family_checkpoint

# Two of them for each family, in turn.
_MOMENTS = ("copy", "swap out", "middle chunk", "swap in", "answer")


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [*CACHE_FAMILIES, *STATE_FAMILIES])
def test_kills_change_no_token(name: str, tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    """R3, R123: while a worker is killed twice within a step, and a scheduler, tokens through all services are those of `generate`.

    Of drawn tokens and schemas, those of an undisturbed run.
    """
    path, killer = family_checkpoint(name, tmp_path / name), Killer(tmp_path)
    number = [*CACHE_FAMILIES, *STATE_FAMILIES].index(name)
    moments = [_MOMENTS[(2 * number + i) % len(_MOMENTS)] for i in range(2)]
    with supervised(
        model=path,
        environ=killer.environ,
        policy_set=("restraint=null", "preemption_mode=swap"),
        max_num_batched_tokens=64,
        worker_args=tight_stacks.tight(path),
        scheduler_args=("--max-num-seqs", "16", "--no-worker-timeout-s", "300", "--max-worker-losses", "50"),
    ) as running:
        address, cases = running.stack.grpc_address, tight_stacks.cases()
        expected = tight_stacks.expected(address, path, cases)

        def harm(readings: Readings) -> None:
            killer.kills(running, moments, seed=number)(readings)
            scheduler_kills.kills(running, 1, seed=number)(readings)

        num_requests, num_tokens = kill_requests.repeat(
            address, cases, expected, harm, logprob_tolerance=tight_stacks.tolerance(name)
        )
        pool = blocks(running.stack.admin_address)["gpu"]
        assert pool["free"] == pool["total"]
    assert killer.counts == Counter(moments)
    size = f"a worker in a {' and a '.join(moments)}, and a scheduler; {num_requests} requests, {num_tokens} tokens"
    record_property("size", f"killed, {name}: {size}, 0 lost or changed")
