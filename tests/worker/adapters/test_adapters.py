"""Adapters in the engine: several in one batch beside the base equal PEFT alone, and no row's bits know of the others."""

import random

import numpy as np
import pytest
import torch

from protos.common.v1 import common_pb2
from svc_common.errors import FailedPrecondition, InvalidArgument
from tests.support.checkpoints import make_checkpoint
from tests.support.worker.adapter_folders import Oracle, make_adapter
from tests.support.worker.chaos import Chaos, origin
from tests.support.worker.driver import BLOCK_SIZE, Driver, generate, make_engine
from worker_svc.adapters import layers as adapter_layers
from worker_svc.adapters.layers import share_out
from worker_svc.executor.model_engine import ModelEngine
from worker_svc.invariance import RowRule
from worker_svc.settings import WorkerSettings

FAMILIES = ("llama", "qwen2", "gpt2")
QUICK_FAMILIES = ("llama", "gpt2")
NEW_TOKENS = 12
TOLERANCE = 1e-4

# Names of modules differ; what is covered: endings, a regular expression, all-linear, patterns of rank and alpha, rslora, LM head.
ATTENTION = {"llama": ["q_proj", "v_proj"], "qwen2": ["q_proj", "k_proj", "o_proj"], "gpt2": ["c_attn"]}
ONE_LAYER = {
    "llama": r"model\.layers\.1\.mlp\..*_proj",
    "qwen2": r"model\.layers\.1\..*_proj",
    "gpt2": r"transformer\.h\.1\.mlp\.c_\w+",
}
PATTERN = {"llama": "down_proj", "qwen2": r"layers\.0\.mlp\.up_proj", "gpt2": "mlp.c_fc"}


def configs_of(family: str) -> dict[int, dict[str, object]]:
    """Adapters by id."""
    pattern = PATTERN[family]
    configs = {
        1: {"r": 8, "lora_alpha": 16, "target_modules": ATTENTION[family]},
        2: {"r": 3, "target_modules": "all-linear", "use_rslora": True},
        3: {"r": 4, "lora_alpha": 4, "target_modules": ONE_LAYER[family]},
        4: {"r": 2, "lora_alpha": 8, "target_modules": ["lm_head", "up_proj"]},
    }
    configs[2] |= {"rank_pattern": {pattern: 17}, "alpha_pattern": {pattern: 5}}
    if family == "gpt2":
        # Linear modules are Conv1D, with weights the other way round; the head is tied, of which PEFT warns.
        configs[4]["target_modules"] = ["mlp.c_fc"]
        configs = {i: config | {"fan_in_fan_out": True} for i, config in configs.items()}
    return configs


class World:
    """An engine with four adapters loaded, the oracle, and prompts with the adapter that each is for."""

    def __init__(self, family: str, folder) -> None:
        self.base = make_checkpoint(family, folder / "base")
        self.paths = {i: make_adapter(self.base, folder / f"a{i}", i, **c) for i, c in configs_of(family).items()}
        self.engine = make_engine(self.base)
        self.driver()
        self.oracle = Oracle(self.base, self.paths)
        rng = random.Random(7)
        self.prompts = {
            f"p{i}": [rng.randrange(256) for _ in range(n)] for i, n in enumerate((1, 5, 16, 33, 9, 20, 120))
        }
        self.adapters = {"p0": 1, "p1": 0, "p2": 2, "p3": 1, "p4": 3, "p5": 4, "p6": 0}

    def driver(self, **options) -> Driver:
        """A new owner, for which the adapters are loaded."""
        driver = Driver(self.engine, **options)
        for adapter_id, path in self.paths.items():
            self.engine.load_adapter(adapter_id, str(path))
        return driver

    def options(self, name: str) -> dict[str, object]:
        return {"rare": {"adapter_id": self.adapters[origin(name)]}}


@pytest.fixture(
    scope="module", params=[f if f in QUICK_FAMILIES else pytest.param(f, marks=pytest.mark.long) for f in FAMILIES]
)
def world(request, tmp_path_factory):
    return World(request.param, tmp_path_factory.mktemp("adapters"))


def mixed(world: World) -> Driver:
    """All prompts at once, decoded together."""
    driver = world.driver()
    for name, prompt in world.prompts.items():
        driver.add(name, prompt, **world.options(name))
    driver.run()
    for _ in range(NEW_TOKENS - 1):
        for name in driver.rows:
            driver.compute(name)
        driver.run()
    return driver


def test_one_batch_equals_peft_alone(world):
    """Several adapters and the base share every step, and each row's tokens and logits are those of PEFT alone."""
    driver = mixed(world)
    for name, prompt in world.prompts.items():
        tokens = [*prompt, *driver.tokens[name]]
        logits = world.oracle.logits(tokens, world.adapters[name])
        for position, found in driver.logits[name].items():
            torch.testing.assert_close(found, logits[position - 1], atol=TOLERANCE, rtol=TOLERANCE)
        assert driver.tokens[name] == logits[len(prompt) - 1 : -1].argmax(-1).tolist()
        plain = world.oracle.logits(tokens, 0)
        assert torch.equal(logits, plain) == (world.adapters[name] == 0), (
            "an adapter that changes nothing shows nothing"
        )


class AdapterChaos(Chaos):
    """Rows keep their adapter through all that happens to them; prefixes are shared under one adapter only."""

    def __init__(self, world: World, seed: int) -> None:
        super().__init__(world.engine, world.prompts, seed)
        self.world = world
        self.driver = world.driver(take_block=self._take)

    def _arrive(self) -> None:
        rows = self.driver.rows
        while self.waiting and self.rng.random() < 0.4:
            name, tokens, num_prompt = self.waiting.pop()
            adapter = self.world.adapters[origin(name)]
            alike = {other: row for other, row in rows.items() if self.world.adapters[origin(other)] == adapter}
            self.driver.rows = alike
            blocks = self._cached(tokens)
            self.driver.rows = rows
            self.users.update(blocks)
            self._add(name, tokens, num_prompt, blocks, len(blocks) * BLOCK_SIZE)

    def _options(self, name):
        return self.world.options(name)


def test_bits_do_not_depend_on_company(world):
    """Rows with adapters and rows without keep their bits under any schedule beside any others."""
    assert world.engine.invariant
    alone = world.driver()
    for name, prompt in world.prompts.items():
        alone._next_block = 0
        generate(alone, name, prompt, NEW_TOKENS, **world.options(name))
    chaos = AdapterChaos(world, seed=3)
    for name, by_position in chaos.run().logits.items():
        for position, logits in by_position.items():
            expected = alone.logits[origin(name)].get(position)
            assert expected is None or torch.equal(logits, expected), f"{name} at {position}"
    assert chaos.events >= {"recompute", "swap", "chunk", "copy on write"}


def test_base_rows_have_the_bits_they_have_without_adapters(world):
    """Base rows in a mixed batch are bitwise those of an engine that never saw an adapter."""
    mixed_driver, plain = mixed(world), Driver(make_engine(world.base))
    for name in ("p1", "p6"):
        plain._next_block = 0
        generate(plain, name, world.prompts[name], NEW_TOKENS)
        for position, logits in plain.logits[name].items():
            assert torch.equal(logits, mixed_driver.logits[name][position])


def test_vectors_and_scored_prompts_beside_adapters(world):
    """One batch of vectors, scored prompts and tokens, with adapters and without: every row gets the bits that it gets alone."""
    scored = common_pb2.ResolvedSampling(num_prompt_logprobs=2)
    kinds = [{"task": common_pb2.TASK_EMBED_MEAN}, {"task": common_pb2.TASK_EMBED_LAST}, {"sampling": scored}, {}]
    rows = [kind | {"adapter_id": adapter} for kind in kinds for adapter in (0, 1, 2, 0)]
    together = world.driver()
    for i, options in enumerate(rows):
        together.add(f"r{i}", world.prompts["p3"][: 9 + i], rare=options)
    found = answers(together.run())
    assert [len(by_row) for by_row in found] == [8, 4]
    for i, options in enumerate(rows):
        alone = world.driver()
        alone.add(f"r{i}", world.prompts["p3"][: 9 + i], rare=options)
        own = answers(alone.run())
        assert [by_row.get(i) for by_row in found] == [by_row.get(0) for by_row in own]
        assert together.tokens[f"r{i}"] == alone.tokens[f"r{i}"]
        for position, logits in alone.logits.get(f"r{i}", {}).items():
            assert torch.equal(together.logits[f"r{i}"][position], logits)


def answers(outputs):
    """Vectors, and log probabilities of prompts, by row."""
    vectors = {found.row: found.values for found in outputs.embeddings}
    return vectors, {found.row: (found.logprobs, found.top_token_ids) for found in outputs.prompt_logprobs}


def test_steps_without_adapters_run_no_hook(world):
    """No module has a hook of ours once a step has no adapter; the first step with one brings them back."""
    model = world.engine._loaded.model._model
    layers = [module for name, module in model.named_modules() if "layers.1" in name or "h.1." in name]
    driver = world.driver()
    driver.add("with", [1, 2, 3], rare={"adapter_id": 2})
    driver.run()
    assert any(module._forward_hooks for module in layers)
    driver.remove("with")
    driver.add("without", [1, 2, 3])
    driver.run()
    assert not any(module._forward_hooks for module in layers)


def test_adapters_come_and_go_while_rows_run(world):
    """Loading and unloading between steps changes no tokens; an adapter in use stays, named by its row."""
    expected = mixed(world).tokens
    driver = world.driver()
    engine = world.engine
    engine.unload_adapter(3)
    for name in ("p0", "p1", "p3"):
        driver.add(name, world.prompts[name], **world.options(name))
    driver.run()
    with pytest.raises(FailedPrecondition, match=r"adapter 1 is used by r0/0, r2/0") as caught:
        engine.unload_adapter(1)
    assert caught.value.reason == "ADAPTER_IN_USE"
    for i in range(NEW_TOKENS - 1):
        if i == 2:
            engine.unload_adapter(2)
            engine.load_adapter(3, str(world.paths[3]))
            driver.add("p4", world.prompts["p4"], **world.options("p4"))
        for name in ("p0", "p1", "p3") if i == 2 else list(driver.rows):
            driver.compute(name)
        driver.run()
    for name, tokens in driver.tokens.items():
        assert tokens == expected[name][: len(tokens)]
    assert len(driver.tokens["p4"]) >= 8
    for name in list(driver.rows):
        driver.remove(name)
    driver.run()
    engine.unload_adapter(1)
    engine.unload_adapter(1)


def test_an_unknown_adapter_is_refused_before_anything_changes(world):
    """The row's field is named, its step changes nothing, and its neighbour's tokens are the same."""
    expected = mixed(world).tokens["p0"]
    driver = world.driver()
    driver.add("p0", world.prompts["p0"], **world.options("p0"))
    driver.run()
    step = driver.step
    driver.compute("p0")
    driver.add("stranger", [1, 2, 3], rare={"adapter_id": 9})
    with pytest.raises(InvalidArgument, match="row 1: adapter 9 is not loaded") as caught:
        driver.run()
    assert caught.value.violations[0].field == "added.options.adapter_id"
    driver.rows.pop("stranger")
    driver.step = type(step)()
    for _ in range(NEW_TOKENS - 1):
        driver.compute("p0")
        driver.run()
    assert driver.tokens["p0"] == expected


def test_weights_are_in_the_models_type(tmp_path):
    """A bfloat16 model holds its adapters in bfloat16, and keeps the invariance contract with them."""
    base = make_checkpoint("llama", tmp_path / "base", dtype="bfloat16")
    path = make_adapter(base, tmp_path / "a", 1, r=8, target_modules="all-linear")
    engine = make_engine(base)
    together, alone = Driver(engine), None
    num_bytes, rank = engine.load_adapter(5, str(path))
    # 16 rows (8 and padding) of every linear module's in and out, 2 bytes each.
    modules = [m for name, m in engine._loaded.model._model.named_modules() if name.endswith("_proj")]
    assert (num_bytes, rank) == (16 * 2 * sum(m.in_features + m.out_features for m in modules), 8)
    for name, adapter_id in (("a", 5), ("b", 0), ("c", 5)):
        together.add(name, range(3, 20), rare={"adapter_id": adapter_id}, room=NEW_TOKENS)
    for _ in range(6):
        together.run()
    assert together.tokens["a"] == together.tokens["c"] != together.tokens["b"]
    alone = Driver(engine)
    engine.load_adapter(5, str(path))
    generate(alone, "a", range(3, 20), 6, rare={"adapter_id": 5})
    for position, logits in alone.logits["a"].items():
        assert torch.equal(logits, together.logits["a"][position])
        assert torch.equal(logits, together.logits["c"][position])


def test_adapters_loaded_before_the_cache(world):
    """An adapter may come before ProfileCache, which settles how its rows are padded; it stays for the first owner."""
    expected = mixed(world)
    settings = WorkerSettings.of(model=world.base, block_size=BLOCK_SIZE, num_gpu_blocks_override=160)
    engine = ModelEngine(settings)
    engine.load(lambda _stage, _fraction: None)
    engine.load_adapter(1, str(world.paths[1]))
    engine.profile(64, 8)
    engine.allocate(160, 0)
    driver = Driver(engine)
    generate(driver, "p3", world.prompts["p3"], 4, rare={"adapter_id": 1})
    for position, logits in driver.logits["p3"].items():
        assert torch.equal(logits, expected.logits["p3"][position])


# --- sharing out rows ------------------------------------------------------------------------------------------------


def test_rows_are_cut_and_padded_by_each_adapters_rule():
    """Every row of an adapter is in one share, at most `maximum` to a share, padded with rows of its own."""
    ids = np.array([2, 0, 2, 7, 2, 2, 0, 2, 2, 0, 0], np.int32)
    rules = {2: RowRule(minimum=2, multiple=2, maximum=4), 7: RowRule(minimum=3)}
    shares = share_out(ids, rules, torch.device("cpu"))
    assert [share.places.tolist() for share in shares[2]] == [[0, 2, 4, 5], [7, 8]]
    assert [share.gathered.tolist() for share in shares[2]] == [[0, 2, 4, 5], [7, 8]]
    assert [share.gathered.tolist() for share in shares[7]] == [[3, 3, 3]]
    assert share_out(ids, {5: RowRule()}, torch.device("cpu")) == {5: []}


def test_products_without_a_rule(world, monkeypatch, caplog):
    """Where no padding keeps the bits, an adapter is refused if the contract was asked for, else served with a warning."""
    engine = make_engine(world.base)
    monkeypatch.setattr(adapter_layers, "measure", lambda *_args, **_options: None)
    engine.load_adapter(1, str(world.paths[1]))
    assert "may depend on the batch" in caplog.text
    strict = make_engine(world.base, invariant=True)
    with pytest.raises(FailedPrecondition, match="--invariant") as caught:
        strict.load_adapter(1, str(world.paths[1]))
    assert caught.value.reason == "NOT_INVARIANT"
