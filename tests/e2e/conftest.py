"""One running stack with the built-in model for the tests of this folder."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.built_in_model import default_model
from quire.client.sync_client import Client
from quire.local_stack.stack import LocalStack
from tests.e2e import tight_stacks
from tests.support.checkpoints import SAMPLE_STATE_FAMILIES
from tests.support.stack.kill_plan import Killer
from tests.support.stack.sizes import MASK_BUDGET_MS, SMALL_STEP
from tests.support.stack.supervised import BUG, Supervised, supervised
from tests.support.worker.adapter_folders import make_adapter
from tests.worker.families.tiny_checkpoints import state_checkpoint


@pytest.fixture(scope="session")
def stack() -> Iterator[LocalStack]:
    """Three processes with `models/tiny` in float32. They tell of no bug; as they end, no library tells of what it did not free."""
    lines: list[str] = []
    options = {"worker_args": ("--dtype", "float32"), "on_line": lambda _name, line: lines.append(line)}
    with LocalStack(**options, max_num_batched_tokens=SMALL_STEP) as running:
        yield running
    assert not any("leaked" in line or BUG in line for line in lines), lines[-200:]


@pytest.fixture(scope="session")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of three adapters of `models/tiny`, by name; each changes its answers in another way."""
    root = tmp_path_factory.mktemp("adapters")
    names = enumerate(("one", "two", "kept"), 1)
    return {name: make_adapter(default_model(), root / name, i, r=4, target_modules="all-linear") for i, name in names}


@pytest.fixture(scope="session")
def killer(tmp_path_factory: pytest.TempPathFactory) -> Killer:
    """Kills the workers of `killable` from within."""
    return Killer(tmp_path_factory.mktemp("kills"))


@pytest.fixture(scope="session")
def killable(
    adapters: dict[str, Path], killer: Killer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Supervised]:
    """The same in few blocks, with chunks, swaps and guesses: whatever a scheduler does to requests, it does here.

    To be killed: what dies is started again. Started with the adapter `kept`, a small mask budget, and the policy file `tight`.
    """
    policy = tmp_path_factory.mktemp("policy") / "tight.yaml"
    policy.write_text("base: quire\nset: {restraint: null, preemption_mode: swap}\n", encoding="utf-8")
    with supervised(
        environ=killer.environ,
        adapters={"kept": adapters["kept"]},
        policy=str(policy),
        policy_set=("num_spec_tokens=4",),
        max_num_batched_tokens=128,
        worker_args=(
            *("--dtype", "float32", "--max-model-len", "256", "--mask-budget-ms", str(MASK_BUDGET_MS)),
            *("--swap-space", "16MiB", "--num-gpu-blocks-override", "20"),
        ),
        scheduler_args=("--max-num-seqs", "16"),
    ) as running:
        yield running


@pytest.fixture(scope="session")
def state_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with Mamba-2 beside attention in each layer."""
    return state_checkpoint(SAMPLE_STATE_FAMILIES[0], tmp_path_factory.mktemp("states") / "model")


@pytest.fixture(scope="session")
def state_killer(tmp_path_factory: pytest.TempPathFactory) -> Killer:
    """Kills the workers of `killable_states` from within."""
    return Killer(tmp_path_factory.mktemp("state-kills"))


@pytest.fixture(scope="session")
def killable_states(state_model: Path, state_killer: Killer) -> Iterator[Supervised]:
    """The services of a model with states, in few blocks, with chunks, swaps and checkpoints close to each other. To be killed."""
    with supervised(
        model=state_model,
        environ=state_killer.environ,
        policy_set=("restraint=null", "preemption_mode=swap"),
        max_num_batched_tokens=64,
        worker_args=tight_stacks.tight(state_model),
        scheduler_args=("--max-num-seqs", "16"),
    ) as running:
        yield running


@pytest.fixture
def tight(killable: Supervised) -> LocalStack:
    """The services of `killable`, for what kills none."""
    return killable.stack


@pytest.fixture
def client(stack: LocalStack) -> Iterator[Client]:
    """A client of the running stack."""
    with Client(stack.grpc_address) as client:
        yield client
