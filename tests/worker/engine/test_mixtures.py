"""Mixtures of experts on a CPU: which are packed, that they compute what their modules do, that others stay as they are."""

import logging

import pytest
import torch
from transformers.models.qwen3_moe import modeling_qwen3_moe

from tests.support.checkpoints import make_checkpoint
from tests.support.cuda import TEST_DEVICE
from tests.support.worker.chaos import NUM_BLOCKS
from tests.support.worker.driver import make_engine
from tests.worker.engine.test_fused import check_equal, loaded, served
from tests.worker.engine.test_invariance import check_schedules
from worker_svc.model.fused.mixture_parts import dense_weights, mixture_parts
from worker_svc.model.fused.packed_mixture import PackedMixture

pytestmark = pytest.mark.skipif(TEST_DEVICE != "cpu", reason="programs are the CPU backend's")

FUSED_LOG = "worker_svc.model.fused"


def mixtures_of(model):
    return [module for module in model._model.modules() if isinstance(module, PackedMixture)]


PACKED = {
    "qwen3_moe": 2,
    "mixtral": 2,
    "qwen2_moe": 2,
    "glm4_moe": 1,
    "deepseek_v3": 1,
    "glm4_moe_lite": 1,
    "mistral4": 1,
}
UNKNOWN = ("phimoe", "llama4_text", "hunyuan_v1_moe")
QUICK = ("qwen2_moe", "deepseek_v3")


@pytest.mark.parametrize("family", [f if f in QUICK else pytest.param(f, marks=pytest.mark.long) for f in PACKED])
def test_packed_mixtures_give_the_modules_results(family, tmp_path):
    """Tokens and logits of the plain modules; the experts' plain weights are gone."""
    path = make_checkpoint(family, tmp_path / "m")
    engine = make_engine(path)
    model = engine._loaded.model
    assert len(mixtures_of(model)) == PACKED[family]
    left = [name for name, parameter in model._model.named_parameters() if parameter.ndim == 3]
    assert not [name for name in left if ".experts." in name]
    check_equal(served(engine), served(make_engine(path, fuse=False)))


@pytest.mark.parametrize("family", [pytest.param(f, marks=() if f == "phimoe" else pytest.mark.long) for f in UNKNOWN])
def test_unknown_mixtures_stay_on_their_modules(family, tmp_path):
    """Another choice of experts, weights before instead of behind them, a router in a form of its own."""
    path = make_checkpoint(family, tmp_path / "m")
    engine = make_engine(path)
    assert not mixtures_of(engine._loaded.model)
    check_equal(served(engine), served(make_engine(path, fuse=False)))


VARIANTS = {
    "weights are not divided by their sum": ("qwen3_moe", {"norm_topk_prob": False}),
    "one expert": ("qwen3_moe", {"num_experts_per_tok": 1}),
    "dense layers among them": ("qwen3_moe", {"num_hidden_layers": 3, "decoder_sparse_step": 2}),
    "scaled weights": ("glm4_moe", {"routed_scaling_factor": 2.5, "norm_topk_prob": False}),
    "another activation": ("mixtral", {"hidden_act": "gelu_pytorch_tanh"}),
}


@pytest.mark.parametrize(
    "name", [n if n == "scaled weights" else pytest.param(n, marks=pytest.mark.long) for n in VARIANTS]
)
def test_variants_are_programs(name, tmp_path):
    """What configurations change."""
    family, config = VARIANTS[name]
    path = make_checkpoint(family, tmp_path / "m", **config)
    engine = make_engine(path)
    assert engine._loaded.model.is_fused
    assert mixtures_of(engine._loaded.model)
    check_equal(served(engine), served(make_engine(path, fuse=False)))


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_experts_with_other_activations_are_not_packed(activation, tmp_path):
    """Seen before anything runs."""
    model = loaded(make_checkpoint("mixtral", tmp_path / "m", hidden_act=activation))
    assert not model.is_fused
    assert not mixtures_of(model)


# --- what modules really do ------------------------------------------------------------------------------------------


def _changed(inner, change):
    return lambda self, *args: change(inner(self, *args))


CHANGES = {
    "weights": (
        modeling_qwen3_moe.Qwen3MoeTopKRouter,
        lambda out: (out[0], out[1] * 1.01, out[2]),
    ),
    "choice": (
        modeling_qwen3_moe.Qwen3MoeTopKRouter,
        lambda out: (out[0], out[1], (out[2] + 1) % out[0].shape[-1]),
    ),
    "sum": (modeling_qwen3_moe.Qwen3MoeSparseMoeBlock, lambda out: out * 1.01),
    "experts": (modeling_qwen3_moe.Qwen3MoeExperts, lambda out: out.roll(1, -1)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_modules_do_otherwise_is_seen(name, tmp_path, monkeypatch, caplog):
    """Routers and mixtures are known by what they compute."""
    owner, change = CHANGES[name]
    path = make_checkpoint("qwen3_moe", tmp_path / "m")
    monkeypatch.setattr(owner, "forward", _changed(owner.forward, change))
    with caplog.at_level(logging.INFO, logger=FUSED_LOG):
        model = loaded(path)
    assert not model.is_fused
    assert not mixtures_of(model)
    assert "structure is not known" in caplog.text


def test_groups_of_experts_and_a_bias_are_found(tmp_path):
    """A router with a bias for the choice: its weights are those of the scores without it."""
    model = loaded(make_checkpoint("glm4_moe", tmp_path / "m", n_routed_experts=8), fuse=False)._model
    mixture = model.model.layers[1].mlp
    mixture.gate.e_score_correction_bias.copy_(torch.linspace(-0.3, 0.3, 8))
    parts = mixture_parts(mixture)
    assert (parts.routing.groups, parts.routing.kept_groups, parts.routing.best_of_group) == (2, 1, 2)
    assert torch.equal(parts.routing.bias, mixture.gate.e_score_correction_bias)
    assert parts.routing.scoring == "sigmoid"
    rows = torch.randn(50, mixture.gate.weight.shape[1], generator=torch.Generator().manual_seed(3))
    logits, weights, chosen = mixture.gate(rows)
    expected = torch.zeros(50, 8).scatter(1, chosen, weights)
    torch.testing.assert_close(dense_weights(logits, parts.routing, torch.float32), expected)


# --- the contract, and forms of weights -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("qwen2_moe", {"dtype": "float32"}),
        ("deepseek_v3", {"dtype": "float32"}),
        ("qwen3_moe", {"dtype": "bfloat16"}),
        ("qwen3_moe", {"dtype": "float32", "quantization": "int8"}),
        pytest.param("glm4_moe", {"dtype": "bfloat16", "quantization": "int4"}, marks=pytest.mark.long),
        pytest.param("mixtral", {"dtype": "float32"}, marks=pytest.mark.long),
    ],
)
def test_bits_do_not_depend_on_company(family, settings, tmp_path):
    """In random schedules with other rows, logits are bitwise equal to those of the row alone."""
    engine = make_engine(make_checkpoint(family, tmp_path / "m"), num_blocks=NUM_BLOCKS, **settings)
    assert engine.invariant
    check_schedules(engine, seeds=(2,))


@pytest.mark.parametrize(("quantization", "most"), [("int8", 0.1), ("int4", 0.6)])
def test_quantized_experts(quantization, most, tmp_path, caplog):
    """Experts are rounded with the other weights; program and modules have the same."""
    path = make_checkpoint("qwen3_moe", tmp_path / "m")
    with caplog.at_level(logging.INFO):
        engine = make_engine(path, quantization=quantization)
    model = engine._loaded.model
    assert model.is_fused
    assert all(mixture.is_quantized for mixture in mixtures_of(model))
    [deviation] = [float(line.split()[4]) for line in caplog.messages if line.startswith("hidden states deviate by")]
    assert 0 < deviation / 100 < most
    assert len({token for tokens in served(engine).tokens.values() for token in tokens}) > 10
