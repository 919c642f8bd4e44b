"""A preset with its knobs, how mixed requests are served under it, and what is compared."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.built_in_model import default_model
from quire.local_stack.stack import LocalStack
from tests.e2e import preset_signs as signs
from tests.e2e.served_life import Life, life_of
from tests.support.stack import mixed_requests
from tests.support.stack.commands import blocks, steps


@dataclass(frozen=True)
class Case:
    """A preset with its knobs, and what its log shows. `num_blocks`: too few for 16 requests at a time."""

    policy: str
    signs: tuple[signs.Sign, ...]
    sets: tuple[str, ...] = ()
    stack: dict[str, Any] = field(default_factory=dict)
    num_blocks: int = 40
    args: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " ".join((self.policy, *self.sets, *self.args))

    @property
    def options(self) -> dict[str, Any]:
        """Fields of StackOptions."""
        return {
            "policy": self.policy,
            "policy_set": self.sets,
            "worker_args": (
                *("--dtype", "float32", "--max-model-len", "192", "--swap-space", "8MiB"),
                *("--num-gpu-blocks-override", str(self.num_blocks)),
            ),
            "scheduler_args": ("--max-num-seqs", "16", *self.args),
            **self.stack,
        }


def serve(case: Case, count: int, folder: Path) -> Life:
    """Serves so many requests under the preset; AssertionError for other tokens than those of an undisturbed run."""
    with LocalStack(**case.options) as stack:
        return serve_on(stack, count, folder)


def serve_on(stack: LocalStack, count: int, folder: Path) -> Life:
    """The same on a stack that runs; of its life the steps since then, and all that its recording shows."""
    expected, first = mixed_requests.undisturbed(default_model(), count), len(steps(stack.admin_address))
    assert mixed_requests.run(stack.grpc_address, mixed_requests.asks(count)) == expected
    pool = blocks(stack.admin_address)["gpu"]
    life = life_of(stack.admin_address, folder)
    assert pool["free"] == pool["total"]
    return Life(life.steps[first:], life.replayed)


def compare(case: Case, count: int, folder: Path) -> str:
    """The same, and AssertionError where the preset's signs are missing; what was done, for people."""
    return check(case, count, serve(case, count, folder))


def check(case: Case, count: int, life: Life) -> str:
    """What is compared of a life."""
    for sign in (*case.signs, signs.some_leave):
        sign(life)
    left = (
        f"{len(life.replayed.left_waiting)} + {len(life.replayed.left_running)} cancelled before + after they started"
    )
    return f"{case}: {count} mixed requests, {len(life.steps)} steps, {len(life.preemptions)} preemptions, {left}"
