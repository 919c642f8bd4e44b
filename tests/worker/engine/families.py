"""A checkpoint of each family and transformers' outputs for it, made once per session on first use; and random schedules."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from transformers import PreTrainedModel

from tests.support.worker import generated
from tests.support.worker.chaos import EVENTS, STATE_EVENTS, Chaos, origin
from tests.support.worker.driver import BLOCK_SIZE, make_engine
from tests.support.worker.generated import BeamRule, Generated, Hypothesis
from tests.worker.families.tiny_checkpoints import family_checkpoint
from worker_svc.executor.model_engine import ModelEngine

# A few more than asked for may come: rows run several decode steps at a time.
SPARE = 3
_LENGTHS = (1, 15, 16, 33, 50, 130)


def prompts_of(seed: int) -> dict[str, list[int]]:
    """Prompts of several lengths, one long; "tail" begins like one of them, by more than two blocks."""
    rng = random.Random(seed)
    prompts = {f"p{n}": [rng.randrange(256) for _ in range(n)] for n in _LENGTHS}
    prompts["tail"] = prompts["p50"][: 2 * BLOCK_SIZE] + prompts["p15"][:3]
    return prompts


class Family:
    """One checkpoint. Owner of its reference, of an engine that tests may use in turn, and of what was generated so far."""

    def __init__(self, name: str, path: Path) -> None:
        self.name, self.path = name, path
        self._greedy: dict[tuple[int, ...], Generated] = {}
        self._beams: dict[tuple[tuple[int, ...], BeamRule], list[Hypothesis]] = {}

    @cached_property
    def reference(self) -> PreTrainedModel:
        """The same checkpoint in transformers."""
        return generated.reference_model(self.path)

    @cached_property
    def engine(self) -> ModelEngine:
        """Loaded and allocated; what its blocks hold is left from other tests."""
        return make_engine(self.path)

    @property
    def num_state_blocks(self) -> int:
        """Blocks of one sequence's states; 0: the family has none."""
        assert self.engine._loaded is not None
        return self.engine._loaded.num_state_blocks

    def greedy(self, prompt: Sequence[int], num_tokens: int) -> Generated:
        """`generated.greedy`."""
        made = self._greedy.get(tuple(prompt))
        if made is None or len(made.token_ids) < num_tokens:
            made = self._greedy[tuple(prompt)] = generated.greedy(self.reference, prompt, num_tokens)
        return Generated(made.token_ids[:num_tokens], made.logprobs[:num_tokens])

    def beams(self, prompt: Sequence[int], rule: BeamRule) -> list[Hypothesis]:
        """`generated.beams`."""
        key = tuple(prompt), rule
        if key not in self._beams:
            self._beams[key] = generated.beams(self.reference, prompt, rule)
        return self._beams[key]


class Families:
    """All of them, each made when it is asked for. `folder`: where the checkpoints go."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[str, Family] = {}

    def __getitem__(self, name: str) -> Family:
        if name not in self._made:
            self._made[name] = Family(name, family_checkpoint(name, self._folder / name))
        return self._made[name]


@dataclass(frozen=True, slots=True)
class World:
    """An engine, the same checkpoint in transformers, and what that makes of each prompt."""

    family: str
    engine: ModelEngine
    reference: PreTrainedModel
    prompts: Mapping[str, list[int]]
    expected: Mapping[str, Generated]


def make_world(family: Family, num_tokens: int) -> World:
    """With the greedy tokens of all prompts. Asserts that these differ enough for a comparison to count."""
    prompts = prompts_of(1)
    expected = {name: family.greedy(prompt, num_tokens + SPARE) for name, prompt in prompts.items()}
    assert is_diverse(expected)
    return World(family.name, family.engine, family.reference, prompts, expected)


def is_diverse(expected: Mapping[str, Generated]) -> bool:
    """True if a comparison with these counts: a model that repeats itself would not notice a wrong cache."""
    return len({token for made in expected.values() for token in made.token_ids}) >= 3 * len(expected)


@dataclass(frozen=True, slots=True)
class Lives:
    """How much was compared."""

    family: str
    num_lives: int
    num_prompts: int
    num_steps: int
    num_tokens: int

    def __str__(self) -> str:
        size = f"{self.num_lives} lives of {self.num_prompts} prompts, {self.num_steps} steps, {self.num_tokens} tokens"
        return f"{self.family}, {size}"


def check_lives(world: World, *, seeds: Sequence[int], num_tokens: int, poisoned: bool = False) -> Lives:
    """Random lives of all prompts at once, in which everything happens that may. Asserts that tokens are those expected."""
    events, count, num_steps = set(), 0, 0
    for seed in seeds:
        chaos = Chaos(world.engine, world.prompts, seed, num_tokens=num_tokens, poisoned=poisoned)
        driver = chaos.run()
        for name, tokens in driver.tokens.items():
            assert len(tokens) >= num_tokens, name
            world.expected[origin(name)].check(tokens, driver.logprobs[name])
        events |= chaos.events
        count += sum(len(tokens) for tokens in driver.tokens.values())
        num_steps += chaos.num_steps
    has_states = world.engine._loaded is not None and world.engine._loaded.num_state_blocks > 0
    assert events == (EVENTS | STATE_EVENTS if has_states else EVENTS)
    return Lives(world.family, len(seeds), len(world.prompts), num_steps, count)
