"""Adapters that are not loaded, and why: each refusal names what is wrong, and leaves what was loaded as it was."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.other import get_pattern_key
from safetensors.torch import load_file, save_file

from svc_common.errors import FailedPrecondition, InvalidArgument, ResourceExhausted
from tests.support.checkpoints import make_checkpoint
from tests.support.worker.adapter_folders import make_adapter
from tests.support.worker.driver import Driver, make_engine
from worker_svc import container
from worker_svc.adapters.config import read_config

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
Q1 = "model.layers.1.self_attn.q_proj"
PREFIX = "base_model.model."


class World:
    """An engine that takes two adapters of rank 32, and one good adapter."""

    def __init__(self, folder: Path) -> None:
        self.base = make_checkpoint("llama", folder / "base")
        self.good = make_adapter(self.base, folder / "good", 1, r=8, target_modules=["q_proj", "v_proj"])
        self.engine = make_engine(self.base, max_adapters=2, max_adapter_rank=32)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return World(tmp_path_factory.mktemp("refused"))


@pytest.fixture
def engine(world):
    """The engine of a new owner, without adapters."""
    Driver(world.engine)
    for adapter_id in range(1, 10):
        world.engine.unload_adapter(adapter_id)
    Driver(world.engine)
    return world.engine


@pytest.fixture
def folder(world, tmp_path):
    """A copy of the good adapter, to be spoilt."""
    return Path(shutil.copytree(world.good, tmp_path / "adapter"))


def set_config(folder: Path, **fields: object) -> None:
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | fields))


def set_weights(folder: Path, change) -> None:
    weights = load_file(folder / WEIGHTS)
    change(weights)
    save_file(weights, folder / WEIGHTS)


def refusal(engine, folder: Path) -> InvalidArgument:
    with pytest.raises(InvalidArgument) as caught:
        engine.load_adapter(1, str(folder))
    assert caught.value.violations[0].field == "path"
    return caught.value


@pytest.mark.parametrize(
    ("field", "value", "word"),
    [
        ("peft_type", "LOHA", "'LOHA'"),
        ("peft_type", None, "None"),
        ("use_dora", True, "DoRA"),
        ("use_qalora", True, "QALoRA"),
        ("bias", "all", "bias='all'"),
        ("bias", "lora_only", "bias='lora_only'"),
        ("lora_bias", True, "lora_bias"),
        ("modules_to_save", ["lm_head"], "modules_to_save"),
        ("target_parameters", ["mlp.experts.gate_up_proj"], "target_parameters"),
        ("trainable_token_indices", [1, 2], "trainable_token_indices"),
        ("layer_replication", [[0, 1], [0, 1]], "layer_replication"),
        ("alora_invocation_tokens", [5], "aLoRA"),
        ("init_lora_weights", "pissa_niter_16", "changes the base"),
        ("init_lora_weights", "olora", "changes the base"),
    ],
)
def test_other_kinds_are_refused(engine, folder, field, value, word):
    """The message says what it is and what is served instead."""
    set_config(folder, **{field: value})
    error = refusal(engine, folder)
    assert error.reason == "ADAPTER_UNSUPPORTED"
    assert word in error.message
    assert "Supported are plain LoRA adapters" in error.message or "changes the base" in word


def test_dora_made_by_peft_is_refused(engine, world, tmp_path):
    """Also by its weights alone, when the configuration does not tell."""
    path = make_adapter(world.base, tmp_path / "dora", 1, r=4, target_modules=["q_proj"], use_dora=True)
    assert "DoRA" in refusal(engine, path).message
    set_config(path, use_dora=False)
    assert "DoRA" in refusal(engine, path).message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("r", 0),
        ("r", "8"),
        ("lora_alpha", "x"),
        ("rank_pattern", {"q_proj": -1}),
        ("alpha_pattern", ["q_proj"]),
        ("target_modules", "(q_proj"),
        ("target_modules", [1]),
        ("layers_to_transform", "all"),
    ],
)
def test_wrong_fields_are_named(engine, folder, field, value):
    """The field and its value are in the message."""
    set_config(folder, **{field: value})
    error = refusal(engine, folder)
    assert error.reason == "ADAPTER_INVALID"
    assert field in error.message


def test_missing_and_broken_files(engine, folder, tmp_path):
    """No folder, no configuration, no weights, pickled weights, cut weights: each says which file."""
    assert refusal(engine, tmp_path / "nowhere").reason == "ADAPTER_NOT_FOUND"
    assert refusal(engine, folder / CONFIG).reason == "ADAPTER_NOT_FOUND"
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[: len(data) // 2])
    assert refusal(engine, folder).reason == "ADAPTER_INVALID"
    (folder / WEIGHTS).unlink()
    assert refusal(engine, folder).reason == "ADAPTER_INCOMPLETE"
    torch.save({}, folder / "adapter_model.bin")
    error = refusal(engine, folder)
    assert error.reason == "PICKLED_WEIGHTS"
    assert "safe_serialization=True" in error.message
    for text in ("{", "[]"):
        (folder / CONFIG).write_text(text)
        assert refusal(engine, folder).reason == "ADAPTER_INVALID"
    (folder / CONFIG).unlink()
    assert CONFIG in refusal(engine, folder).message


def test_weights_are_what_the_configuration_says(engine, folder):
    """A lost matrix, one too many, one of another rank, of whole numbers or not finite."""
    down, up = f"{PREFIX}{Q1}.lora_A.weight", f"{PREFIX}{Q1}.lora_B.weight"
    good = load_file(folder / WEIGHTS)
    for change, reason, word in (
        (lambda w: w.pop(up), "ADAPTER_INCOMPLETE", up),
        (lambda w: (w.pop(up), w.pop(down)), "ADAPTER_MISMATCH", Q1),
        (lambda w: w.update({f"{PREFIX}{Q1}.bias": torch.zeros(1)}), "ADAPTER_UNSUPPORTED", "bias"),
        (lambda w: w.update({"lm_head.weight": torch.zeros(1)}), "ADAPTER_UNSUPPORTED", "lm_head"),
        (lambda w: w.update({down: torch.zeros(4, 64), up: torch.zeros(64, 4)}), "ADAPTER_MISMATCH", "rank 8"),
        (lambda w: w.update({down: torch.zeros(8, 64, dtype=torch.int32)}), "ADAPTER_INVALID", down),
        (lambda w: w[down].fill_(float("nan")), "ADAPTER_INVALID", Q1),
        (lambda w: w.clear(), "ADAPTER_INCOMPLETE", "no weights"),
    ):
        save_file({name: tensor.clone() for name, tensor in good.items()}, folder / WEIGHTS)
        set_weights(folder, change)
        error = refusal(engine, folder)
        assert (error.reason, word in error.message) == (reason, True), error.message
    save_file(good, folder / WEIGHTS)
    set_config(folder, target_modules=["v_proj"])
    assert "target_modules" in refusal(engine, folder).message


def test_an_adapter_of_another_base_names_module_and_shapes(engine, tmp_path):
    """Wider models, deeper ones, other families, and modules that are no plain linear ones."""
    wide = make_checkpoint("llama", tmp_path / "wide", hidden_size=128, head_dim=16)
    error = refusal(engine, make_adapter(wide, tmp_path / "a", 1, r=8, target_modules=["q_proj"]))
    assert error.reason == "ADAPTER_MISMATCH"
    assert error.metadata["module"].endswith("layers.0.self_attn.q_proj")
    assert "lora_A of 8x64" in error.message
    assert "8x128" in error.message
    deep = make_checkpoint("llama", tmp_path / "deep", num_hidden_layers=3)
    error = refusal(engine, make_adapter(deep, tmp_path / "b", 1, r=8, target_modules=["q_proj"]))
    assert (error.metadata["module"], "does not exist" in error.message) == ("model.layers.2.self_attn.q_proj", True)
    shallow = make_checkpoint("llama", tmp_path / "shallow", num_hidden_layers=1)
    error = refusal(engine, make_adapter(shallow, tmp_path / "c", 1, r=8, target_modules=["q_proj"]))
    assert (error.metadata["module"], "no weights for it" in error.message) == (Q1, True)
    other = make_checkpoint("gpt2", tmp_path / "other")
    error = refusal(engine, make_adapter(other, tmp_path / "d", 1, r=8, target_modules=["c_attn"], fan_in_fan_out=True))
    assert error.metadata["module"] == "transformer.h.0.attn.c_attn"


def test_layers_norms_and_embeddings_are_no_targets(engine, folder):
    """A module that exists but is no linear one is named with its class."""
    name = "model.layers.1.input_layernorm"

    def move(weights):
        for end in (".lora_A.weight", ".lora_B.weight"):
            weights[f"{PREFIX}{name}{end}"] = weights.pop(f"{PREFIX}{Q1}{end}")

    set_weights(folder, move)
    error = refusal(engine, folder)
    assert (error.metadata["module"], "LlamaRMSNorm" in error.message) == (name, True)


def test_limits_of_rank_number_and_memory(engine, world, tmp_path, monkeypatch):
    """Ranks and numbers above the settings, and adapters that do not fit, are refused with the option to change."""
    path = make_adapter(world.base, tmp_path / "high", 1, r=33, target_modules=["q_proj"])
    error = refusal(engine, path)
    assert (error.reason, "--max-adapter-rank" in error.message) == ("ADAPTER_RANK", True)
    engine.load_adapter(1, str(world.good))
    engine.load_adapter(2, str(world.good))
    with pytest.raises(ResourceExhausted, match="--max-adapters"):
        engine.load_adapter(3, str(world.good))
    engine.unload_adapter(2)
    monkeypatch.setattr(container, "free_memory_bytes", lambda: 1000)
    with pytest.raises(ResourceExhausted, match="1000 are free"):
        engine.load_adapter(3, str(world.good))
    monkeypatch.undo()
    engine.load_adapter(3, str(world.good))


def test_an_id_means_one_adapter(engine, world, folder):
    """Idempotent for equal id and path; never another path nor other content, not even after it was unloaded."""
    first = engine.load_adapter(1, str(folder))
    assert engine.load_adapter(1, str(folder / ".." / folder.name)) == first
    with pytest.raises(FailedPrecondition, match="use a new id") as caught:
        engine.load_adapter(1, str(world.good))
    assert caught.value.reason == "ADAPTER_ID_TAKEN"
    engine.unload_adapter(1)
    with pytest.raises(FailedPrecondition, match="use a new id"):
        engine.load_adapter(1, str(world.good))
    assert engine.load_adapter(1, str(folder)) == first
    engine.unload_adapter(1)
    set_weights(folder, lambda weights: weights[f"{PREFIX}{Q1}.lora_A.weight"].mul_(2))
    with pytest.raises(FailedPrecondition, match="have changed since"):
        engine.load_adapter(1, str(folder))
    for adapter_id, path, field in ((0, str(folder), "adapter_id"), (2, "", "path")):
        with pytest.raises(InvalidArgument) as wrong:
            engine.load_adapter(adapter_id, path)
        assert wrong.value.violations[0].field == field


def test_a_new_owner_gives_ids_anew(engine, world, folder):
    """What an earlier owner left behind is replaced under its id, and dropped where room is needed."""
    engine.load_adapter(1, str(world.good))
    engine.load_adapter(2, str(world.good))
    engine.reset()
    engine.load_adapter(1, str(folder))
    engine.load_adapter(3, str(folder))
    driver = Driver(engine)
    driver.add("left", [1, 2, 3], rare={"adapter_id": 2})
    with pytest.raises(InvalidArgument, match="adapter 2 is not loaded"):
        driver.run()


NAMES = (
    "q_proj", "model.layers.0.q_proj", "model.layers.1.q_proj", "model.layers.3.q_proj", "model.layers.1.xq_proj",
    "model.h.2.fc.1.q", "model.layers.10.mlp.up_proj", "h.0.fc", "model.h.0.fc", "lm_head", "a.b.c",
    "model.layers.1.experts.2.up_proj", "",
)  # fmt: skip


@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": ["q_proj", "h.0.fc"]},
        {
            "target_modules": ["q_proj", "up_proj"],
            "exclude_modules": ["layers.0.q_proj"],
            "layers_to_transform": [1, 2],
        },
        {"target_modules": ["q_proj", "up_proj"], "exclude_modules": r".*\.1\..*"},
        {"target_modules": r".*\.1\..*"},
        {"target_modules": ["q", "q_proj"], "layers_to_transform": 2, "layers_pattern": "h"},
        {"target_modules": ["q", "q_proj"], "layers_to_transform": [0, 2], "layers_pattern": ["h", "layers"]},
        {
            "target_modules": ["q"],
            "rank_pattern": {"q": 2, "q_proj": 3, r"layers.1\d*.*": 5},
            "alpha_pattern": {r"\w+\.q": 3},
        },
    ],
)
def test_matching_is_pefts_own(fields):
    """The modules, ranks and alphas that PEFT's own functions choose."""
    theirs = LoraConfig(r=4, lora_alpha=8, **fields)
    ours = read_config({"peft_type": "LORA", "r": 4, "lora_alpha": 8} | fields)
    assert [ours.may_change(name) for name in NAMES] == [
        bool(check_target_module_exists(theirs, name)) for name in NAMES
    ]
    for name in NAMES:
        rank = theirs.rank_pattern.get(get_pattern_key(theirs.rank_pattern, name), theirs.r)
        alpha = theirs.alpha_pattern.get(get_pattern_key(theirs.alpha_pattern, name), theirs.lora_alpha)
        assert (ours.rank_of(name), ours.scale_of(name)) == (rank, alpha / rank)


def test_targets_may_be_unsaid():
    """Without target_modules the weights alone say what is changed."""
    assert read_config({"peft_type": "LORA"}).may_change("anything")
