"""Two ranks of a mixture of experts: a rank whose experts get no token takes part in every sum."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers.models.mixtral import modeling_mixtral

from svc_common.errors import ConfigError
from tests.support.checkpoints import make_checkpoint
from tests.support.routed_checkpoint import TOKENS_OF_RANK, make_routed, ranks_of
from tests.support.worker import generated
from tests.support.worker.driver import Driver, generate
from tests.support.worker.rank_group import RunningGroup, follower, joining, running, settings_of
from worker_svc.model.checkpoint import model_class, open_checkpoint
from worker_svc.model.sharding import plan

NUM_STEPS = 24


@pytest.fixture(scope="module", params=["mixtral", pytest.param("qwen3_moe", marks=pytest.mark.long)])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_routed(request.param, tmp_path_factory.mktemp("experts") / request.param)


@pytest.fixture(scope="module")
def group(checkpoint: Path) -> Iterator[RunningGroup]:
    with running(checkpoint) as found:
        yield found


@contextmanager
def shares(group: RunningGroup) -> Iterator[list[float]]:
    """The share of rank 0's experts in what each call of a layer's experts routes."""
    assert group.own._loaded is not None
    found: list[float] = []

    def note(module: nn.Module, given: tuple[torch.Tensor, ...]) -> None:
        found.append((given[1] < module.num_experts).float().mean().item())

    experts = [m for name, m in group.own._loaded.model._model.named_modules() if name.endswith(".experts")]
    assert [module.num_experts for module in experts] == [2, 2]
    hooks = [module.register_forward_pre_hook(note) for module in experts]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def prompt_of(rank: int, length: int = 20) -> list[int]:
    draw = random.Random(length)
    return [draw.choice(TOKENS_OF_RANK[rank]) for _ in range(length)]


@pytest.mark.parametrize("rank", [0, 1])
def test_an_idle_rank_takes_part(group: RunningGroup, checkpoint: Path, rank: int) -> None:
    """R194: all tokens of 24 steps go to the experts of one rank; tokens and logprobs are those of `generate`."""
    driver, prompt = Driver(group), prompt_of(rank)
    with shares(group) as of_rank_0:
        generate(driver, "a", prompt, NUM_STEPS)
    assert of_rank_0 == [1.0 - rank] * (2 * NUM_STEPS)
    model = generated.reference_model(checkpoint)
    generated.greedy(model, prompt, NUM_STEPS).check(driver.tokens["a"], driver.logprobs["a"])
    assert ranks_of(model, prompt + driver.tokens["a"][:-1]) == {rank}
    assert len(set(driver.tokens["a"])) > 8 and not group.losses


def test_ranks_are_idle_by_turns(group: RunningGroup, checkpoint: Path) -> None:
    """Rows of either rank come and go; steps with both, and with one."""
    driver, lengths = Driver(group), {"a": 8, "b": 16, "c": 12, "d": NUM_STEPS}
    prompts = {name: prompt_of(i % 2, 5 + i) for i, name in enumerate(lengths)}
    with shares(group) as of_rank_0:
        for name, prompt in prompts.items():
            driver.add(name, prompt, room=NUM_STEPS)
            driver.run()
        while driver.rows:
            for name in [name for name in driver.rows if len(driver.tokens[name]) >= lengths[name]]:
                driver.remove(name)
            if driver.rows:
                driver.run()
    assert min(of_rank_0) == 0 and max(of_rank_0) == 1 and any(0 < share < 1 for share in of_rank_0)
    model = generated.reference_model(checkpoint)
    for name, prompt in prompts.items():
        generated.greedy(model, prompt, lengths[name]).check(driver.tokens[name], driver.logprobs[name])


@pytest.mark.long
def test_ranks_that_round_otherwise_are_refused(checkpoint: Path) -> None:
    """Each rank computes the router, so near ties must be decided alike; both values are named."""
    settings = settings_of(checkpoint, num_threads=1)
    with joining(settings) as group:
        group.followers[0].kill()
        group.followers.append(follower(settings, group.meeting.port, 1, num_threads=2))
        with pytest.raises(
            ConfigError, match=r"routers are computed with is .* 2 threads, .* at rank 1 and .* 1 threads, .* at rank 0"
        ):
            group.load(lambda _stage, _fraction: None)


@pytest.mark.long
def test_experts_are_divided_over_four_ranks(tmp_path: Path) -> None:
    """One of four experts each, and key-value heads on two ranks each; sums by Gloo."""
    path = make_checkpoint("qwen3_moe", tmp_path / "qwen3_moe")
    with running(path, 4, backend="reference") as group:
        driver, prompt = Driver(group), list(range(40))
        generate(driver, "a", prompt, NUM_STEPS)
    generated.greedy(generated.reference_model(path), prompt, NUM_STEPS).check(driver.tokens["a"], driver.logprobs["a"])


# --- refused before weights are read -----------------------------------------------------------------------------------


class _PlainExperts(nn.Module):
    """Experts that do not state that they can skip some."""

    def __init__(self, config: modeling_mixtral.MixtralConfig) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(config.num_local_experts, 2, config.hidden_size))
        self.down_proj = nn.Parameter(torch.empty(config.num_local_experts, config.hidden_size, 1))


def test_modules_that_cannot_skip_experts_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The module is named."""
    found = open_checkpoint(make_checkpoint("mixtral", tmp_path / "mixtral"))
    monkeypatch.setattr(modeling_mixtral, "MixtralExperts", _PlainExperts)
    with pytest.raises(ConfigError, match=r"model\.layers\.0\.mlp\.experts, which cannot skip experts of other ranks"):
        plan.sharded(found, model_class(found), 0, 2)


def test_layers_with_different_experts_are_refused() -> None:
    """A rank's experts have the same numbers in every layer."""
    styles = {"layers.*.mlp.experts.down_proj": "grouped_gemm", "layers.*.mlp.experts": "ep_dispatch_experts"}
    shapes = {f"model.layers.{i}.mlp.experts.down_proj": torch.Size([count, 2, 2]) for i, count in enumerate((4, 8))}
    with pytest.raises(ConfigError, match=r"different experts: \[4, 8\] of them"):
        plan._expert_part(styles, shapes, 0, 2)
