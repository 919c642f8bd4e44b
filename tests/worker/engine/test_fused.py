"""Models as programs over packed weights: which are, that they compute what their modules do, what happens where they do not."""

import functools
import logging
import os
import weakref
from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import Qwen2ForCausalLM
from transformers.activations import ACT2FN
from transformers.models.llama import modeling_llama

from paged_kernels.cpu_compiled import CompiledCpuBackend
from paged_kernels.cpu_library import load_library
from svc_common.errors import ConfigError
from tests.support.checkpoints import FAMILIES, config_of, make_checkpoint, make_model
from tests.support.cuda import TEST_DEVICE
from tests.support.worker.driver import Driver, make_engine, new_engine
from tests.worker.engine.families import prompts_of
from worker_svc.model import checkpoint
from worker_svc.model.dummy_batch import LONGEST
from worker_svc.model.fused import equivalence_check, operators
from worker_svc.model.fused.packed_linear import PackedLinear, merged

pytestmark = pytest.mark.skipif(TEST_DEVICE != "cpu", reason="programs are the CPU backend's")

MIXED_FAMILIES = ("mixtral", "qwen3_moe", "glm4_moe")
GATED_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", *MIXED_FAMILIES)
QUICK_FAMILIES = ("qwen2", "gemma2", "phi3", "glm4_moe")
ROUNDED_FAMILIES = ("gemma2", "qwen3_moe")
NEW_TOKENS = 10
TOLERANCE = 2e-4
FUSED_LOG = "worker_svc.model.fused"


def loaded(path, **settings):
    """The model of an engine that was only loaded."""
    engine = new_engine(path, **settings)
    engine.load(lambda _stage, _fraction: None)
    return engine._loaded.model


def served(engine, prompts=None):
    """All prompts at once, decoded together."""
    driver = Driver(engine)
    for name, prompt in (prompts or prompts_of(3)).items():
        driver.add(name, prompt, room=NEW_TOKENS)
    for _ in range(NEW_TOKENS):
        driver.run()
    return driver


def check_equal(one, other, tolerance=TOLERANCE):
    """The same tokens; logits but for the order of sums."""
    assert one.tokens == other.tokens
    assert len({token for tokens in one.tokens.values() for token in tokens}) > NEW_TOKENS
    for name, by_position in one.logits.items():
        for position, logits in by_position.items():
            torch.testing.assert_close(logits, other.logits[name][position], rtol=tolerance, atol=tolerance)


def warnings_of(caplog):
    return [record.message for record in caplog.records if record.levelno >= logging.WARNING]


# --- which ones ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_which_families_are_programs(family, families):
    """On a CPU, decoders of attention and gated layers run as one program; other models have their linear modules packed."""
    model = families[family].engine._loaded.model
    assert model.is_fused == (family in GATED_FAMILIES)
    modules = list(model._model.modules())
    assert not any(type(module) is nn.Linear for module in modules)
    assert any(isinstance(module, PackedLinear) for module in modules)


@pytest.mark.parametrize("family", ["qwen2", "gemma2"])
def test_the_head_is_called_directly_where_its_logits_are_known(family, families, monkeypatch):
    """The model's own forward pass is left out; gemma2 caps its logits, as its configuration says."""
    engine = make_engine(families[family].path)
    calls, model = [], engine._loaded.model._model
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda **given: calls.append(1) or forward(**given))
    driver = served(engine)
    assert not calls
    check_equal(driver, served(families[family].engine), tolerance=0)


def test_the_head_is_not_called_directly_where_logits_are_others(families, monkeypatch):
    """A model that does more to logits than its configuration says runs its own forward pass."""
    forward = Qwen2ForCausalLM.forward

    @functools.wraps(forward)
    def halved(self, *args, **given):
        out = forward(self, *args, **given)
        out.logits = out.logits / 2
        return out

    monkeypatch.setattr(Qwen2ForCausalLM, "forward", halved)
    engine = make_engine(families["qwen2"].path)
    assert engine._loaded.model._plain_head is None


def some_quick(names, quick):
    """Parameters of which all but `quick` are for long runs."""
    return [name if name in quick else pytest.param(name, marks=pytest.mark.long) for name in names]


@pytest.mark.parametrize(
    "family", [f if f in QUICK_FAMILIES else pytest.param(f, marks=pytest.mark.long) for f in GATED_FAMILIES]
)
def test_tokens_are_those_of_the_modules(family, families):
    """A decoder run as one program gives the tokens of its plain modules, for a batch of prompts."""
    plain = make_engine(families[family].path, fuse=False)
    assert not plain._loaded.model.is_fused
    assert any(type(module) is nn.Linear for module in plain._loaded.model._model.modules())
    check_equal(served(families[family].engine), served(plain))


@pytest.mark.parametrize(
    "family", [f if f in ROUNDED_FAMILIES else pytest.param(f, marks=pytest.mark.long) for f in GATED_FAMILIES]
)
def test_bfloat16_rounds_where_modules_round(family, tmp_path):
    """In bfloat16, logits of the program deviate from float32's no more than 1.2 times as much as those of the plain modules."""
    exact, path = [make_checkpoint(family, tmp_path / dtype, dtype=dtype) for dtype in ("float32", "bfloat16")]
    hidden = {}
    for name, folder, settings in (("exact", exact, {}), ("fused", path, {}), ("plain", path, {"fuse": False})):
        engine = make_engine(folder, **settings)
        assert engine._loaded.model.is_fused == (name != "plain")
        hidden[name] = last_logits(engine)
    off = {name: float((hidden[name] - hidden["exact"]).norm() / hidden["exact"].norm()) for name in ("fused", "plain")}
    assert 0 < off["fused"] < 1.2 * off["plain"]


def last_logits(engine):
    """Of the prompts' last tokens."""
    driver = Driver(engine)
    prompts = prompts_of(4)
    for name, prompt in prompts.items():
        driver.add(name, prompt)
    driver.run()
    return torch.stack([driver.logits[name][len(prompt)] for name, prompt in prompts.items()])


VARIANTS = {
    "biases everywhere": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "tanh gelu": ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "one head of keys": ("qwen2", {"num_attention_heads": 12, "num_key_value_heads": 1, "hidden_size": 192}),
    "part of a head is turned": ("phi3", {"partial_rotary_factor": 0.5}),
    "llama 3 rope": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3", "rope_theta": 10_000.0, "factor": 4.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
            }
        },
    ),
    "tied head": ("llama", {"tie_word_embeddings": True}),
}  # fmt: skip


@pytest.mark.parametrize("name", some_quick(VARIANTS, {"biases everywhere", "part of a head is turned"}))
def test_variants_are_programs(name, tmp_path):
    """The same code serves what configurations change."""
    family, config = VARIANTS[name]
    path = make_checkpoint(family, tmp_path / "m", **config)
    engine = make_engine(path)
    assert engine._loaded.model.is_fused
    check_equal(served(engine), served(make_engine(path, fuse=False)))


STRANGERS = {
    "another activation": ("llama", {"hidden_act": "relu"}),
    "gelu without tanh": ("llama", {"hidden_act": "gelu"}),
    "heads that fill no panel": ("llama", {"head_dim": 20, "num_key_value_heads": 1}),
    "gates that fill no panel": ("phi3", {"intermediate_size": 24}),
    "a router that asks for its weights' dtype": ("hunyuan_v1_moe", {}),
}


@pytest.mark.parametrize(
    "name", some_quick(STRANGERS, {"gates that fill no panel", "a router that asks for its weights' dtype"})
)
def test_strangers_are_served_by_their_modules(name, tmp_path, caplog):
    """What is not known is seen before anything runs; packed modules compute."""
    family, config = STRANGERS[name]
    path = make_checkpoint(family, tmp_path / "m", **config)
    with caplog.at_level(logging.INFO, logger=FUSED_LOG):
        engine = make_engine(path)
    assert not engine._loaded.model.is_fused
    assert "its modules run one by one" in caplog.text
    assert not any(type(module) is nn.Linear for module in engine._loaded.model._model.modules())
    check_equal(served(engine), served(make_engine(path, fuse=False)))


# --- what modules really do ------------------------------------------------------------------------------------------


def _scaled(inner):
    return lambda *args, **options: inner(*args, **options) * 1.5


def _scaled_attention(inner):
    def forward(*args, **options):
        out, weights = inner(*args, **options)
        return out * 0.8, weights

    return forward


def _interleaved(_inner):
    """Neighbours are turned instead of halves (GPT-J, GLM)."""

    def apply(q, k, cos, sin, unsqueeze_dim=1):
        cos, sin = (x.unsqueeze(unsqueeze_dim)[..., : q.shape[-1] // 2].repeat_interleave(2, -1) for x in (cos, sin))

        def turned(x):
            return x * cos + torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2) * sin

        return turned(q), turned(k)

    return apply


CHANGES = {
    "gated part": (modeling_llama.LlamaMLP, "forward", _scaled),
    "attention": (modeling_llama.LlamaAttention, "forward", _scaled_attention),
    "rotation": (modeling_llama, "apply_rotary_pos_emb", _interleaved),
    "stream": (modeling_llama.LlamaDecoderLayer, "forward", _scaled),
}


@pytest.mark.parametrize("name", some_quick(CHANGES, {"rotation", "gated part"}))
def test_what_no_module_shows_is_found_by_the_trial(name, families, monkeypatch, caplog):
    """A module that looks like a known one and computes something else: one warning, and the modules serve."""
    owner, attribute, change = CHANGES[name]
    usual = served(families["llama"].engine).tokens
    monkeypatch.setattr(owner, attribute, change(getattr(owner, attribute)))
    path = families["llama"].path
    with caplog.at_level(logging.WARNING):
        engine = make_engine(path)
    assert not engine._loaded.model.is_fused
    [warning] = warnings_of(caplog)
    assert "the fused decoder's results deviate by" in warning
    found = served(engine)
    check_equal(found, served(make_engine(path, fuse=False)))
    assert found.tokens != usual, "the change changes something"


def _counting(inner):
    """Results are others from a position on that is beyond the trial (Ministral 3 does so with queries)."""

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, position_ids=None, **options):
        out, weights = inner(self, hidden_states, position_embeddings, attention_mask, **options)
        return out * (1 + (position_ids >= 100)[..., None].to(out.dtype)), weights

    return forward


def _of_sequences(inner):
    def forward(self, x):
        if x.ndim != 3:
            raise ValueError("rows of sequences are wanted")
        return inner(self, x)

    return forward


SEEN = {
    "attention that counts": (modeling_llama.LlamaAttention, _counting),
    "norm": (modeling_llama.LlamaRMSNorm, _scaled),
    "centred norm": (
        modeling_llama.LlamaRMSNorm,
        lambda inner: lambda self, x: inner(self, x - x.mean(-1, keepdim=True)),
    ),
    "activation": (type(ACT2FN["silu"]), _scaled),
    "norm that wants to be called in its own way": (modeling_llama.LlamaRMSNorm, _of_sequences),
}


@pytest.mark.parametrize("name", SEEN)
def test_what_a_module_shows_is_seen(name, families, monkeypatch, caplog):
    """Norms and activations are known by what they compute, not by their names."""
    owner, change = SEEN[name]
    monkeypatch.setattr(owner, "forward", change(owner.forward))
    path = families["llama"].path
    with caplog.at_level(logging.INFO, logger=FUSED_LOG):
        engine = make_engine(path)
    assert not engine._loaded.model.is_fused
    assert "structure is not known" in caplog.text
    assert warnings_of(caplog) == []
    check_equal(served(engine), served(make_engine(path, fuse=False)))


def test_positions_are_the_models_own(families, monkeypatch, caplog):
    """Angles are asked of the model: with others than usual it is a program all the same, and right."""
    inner = modeling_llama.LlamaRotaryEmbedding.forward
    monkeypatch.setattr(
        modeling_llama.LlamaRotaryEmbedding, "forward", lambda self, x, position_ids: inner(self, x, position_ids * 3)
    )
    path = families["llama"].path
    with caplog.at_level(logging.WARNING):
        engine = make_engine(path)
    assert engine._loaded.model.is_fused
    assert warnings_of(caplog) == []
    check_equal(served(engine), served(make_engine(path, fuse=False)))


def test_a_layer_with_a_factor_is_no_program(tmp_path):
    """Granite's residuals have a factor: of one near 1, a trial in bfloat16 notices nothing."""
    config = {**config_of("llama"), "model_type": "granite", "residual_multiplier": 0.98, "attention_multiplier": 0.25}
    assert not loaded(make_model(config, tmp_path / "factor"), dtype="bfloat16").is_fused
    assert loaded(make_model({**config, "residual_multiplier": 1.0}, tmp_path / "one"), dtype="bfloat16").is_fused


def _routed_by_weights(inner):
    return lambda self, x: (
        inner(self, x) + torch.nn.functional.linear(x, self.gate_proj.weight.float())[..., : x.shape[-1]]
    )


def test_packed_weights_are_not_computed_with(families, monkeypatch):
    """torch multiplies with tensors on the meta device in silence; LongCat's router reads the weight of a linear module so."""
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", _routed_by_weights(modeling_llama.LlamaMLP.forward))
    with pytest.raises(ConfigError, match=r"computes with the weight of a linear module inside it.*set --no-fuse"):
        loaded(families["llama"].path)
    assert not loaded(families["llama"].path, fuse=False).is_fused


@pytest.mark.parametrize("deviation", [float("nan"), 0.5])
def test_a_trial_that_is_off(deviation, families, monkeypatch, caplog):
    """Whatever the reason: the program goes, the modules stay, one line says so."""
    usual = served(families["qwen2"].engine).tokens
    monkeypatch.setattr(equivalence_check, "_deviation", lambda *_: deviation)
    with caplog.at_level(logging.WARNING):
        engine = make_engine(families["qwen2"].path)
    assert not engine._loaded.model.is_fused
    [warning] = warnings_of(caplog)
    assert f"deviate by {deviation:.2g}" in warning
    assert served(engine).tokens == usual


def test_layers_that_count_tokens_are_no_program(tmp_path, monkeypatch):
    """A layer that asks transformers' cache for its length may do with positions what no trial reaches."""
    inner = modeling_llama.LlamaAttention.forward

    def counting(self, hidden_states, position_embeddings, attention_mask, past_key_values=None, **options):
        before = 0 if past_key_values is None else past_key_values.get_seq_length(self.layer_idx)
        far = torch.arange(hidden_states.shape[1]) + before > 1000
        hidden_states = hidden_states * (1.0 + far[:, None])
        return inner(self, hidden_states, position_embeddings, attention_mask, past_key_values, **options)

    path = make_checkpoint("llama", tmp_path / "m")
    assert loaded(path).is_fused
    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", counting)
    assert not loaded(path).is_fused


def test_the_trial_does_not_only_warn_of_gross_errors(families, monkeypatch):
    """A window that is one token off is found."""
    inner = operators.Attend
    monkeypatch.setattr(
        operators,
        "Attend",
        lambda layer, rule, group: inner(layer, replace(rule, sliding_window=rule.sliding_window - 1), group),
    )
    assert not loaded(families["mistral"].path).is_fused


# --- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "tied"), [("llama", False), ("llama", True), ("phi3", False), ("opt", True)])
def test_plain_weights_are_gone(family, tied, tmp_path, monkeypatch):
    """Once packed, no plain matrix is referenced; memory is the checkpoint's, and the head's where it is tied."""
    path = make_checkpoint(family, tmp_path / "m", tie_word_embeddings=tied)
    plain, inner = [], checkpoint.load_model

    def watched(*given):
        model, stored = inner(*given)
        linears = [module for module in model.modules() if type(module) is nn.Linear]
        plain.extend(weakref.ref(linear.weight) for linear in linears)
        return model, stored

    monkeypatch.setattr(checkpoint, "load_model", watched)
    model = loaded(path)
    alive = [ref() for ref in plain if ref() is not None]
    assert len(plain) > 4
    assert len(alive) == tied, "the embedding shares the head's"
    head = model._model.get_output_embeddings()
    wanted = sum(file.stat().st_size for file in path.glob("*.safetensors")) + tied * head.num_bytes
    assert abs(model.weight_bytes - wanted) < 0.03 * wanted


# --- corners ---------------------------------------------------------------------------------------------------------


def test_biases_of_some(compiled_kernels):
    """Matrices that are merged keep their biases, those without one included."""
    linears = [nn.Linear(8, 16, bias=biased) for biased in (True, False, True)]
    rows = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        found = compiled_kernels.linear(rows, merged(compiled_kernels, linears))
        torch.testing.assert_close(found, torch.cat([linear(rows) for linear in linears], -1))


@pytest.fixture(scope="module")
def compiled_kernels():
    return CompiledCpuBackend(load_library(os.environ, lambda _: None)).decoder


def test_few_positions(families):
    """A model for sequences shorter than any trial is tried with the angles that the trial needs."""
    path = families["llama"].path
    engine = make_engine(path, max_model_len=8)
    assert engine._loaded.model.is_fused
    assert min(len(op.cosines) for op in places_of(engine._loaded.model)) >= LONGEST
    prompts = {"a": [5, 6, 7], "b": [9]}
    plain = make_engine(path, max_model_len=8, fuse=False)
    drivers = [Driver(engine), Driver(plain)]
    for driver in drivers:
        for name, prompt in prompts.items():
            driver.add(name, prompt, room=5)
        for _ in range(5):
            driver.run()
    assert drivers[0].tokens == drivers[1].tokens


def places_of(model):
    """The program's operators that know positions."""
    return [op for op in model._fused._program._program.operators if isinstance(op, operators.RotateAndStore)]


def test_depth_that_is_not_packed(tmp_path):
    """bfloat16 rows of an odd length stay with their plain module."""
    path = make_checkpoint("opt", tmp_path / "m", dtype="bfloat16", ffn_dim=129)
    model = loaded(path)
    kinds = {name: type(module) for name, module in model._model.named_modules() if name.endswith((".fc1", ".fc2"))}
    assert {kind for name, kind in kinds.items() if name.endswith("fc2")} == {nn.Linear}
    assert {kind for name, kind in kinds.items() if name.endswith("fc1")} == {PackedLinear}


def test_without_compiled_kernels(families, monkeypatch, caplog):
    """No compiler, or compiled code forbidden: module by module, the same tokens, one warning."""
    usual = served(families["gemma2"].engine)
    monkeypatch.setenv("QUIRE_CPU_KERNELS", "torch")
    with caplog.at_level(logging.WARNING):
        engine = make_engine(families["gemma2"].path)
    assert not engine._loaded.model.is_fused
    assert any(type(module) is nn.Linear for module in engine._loaded.model._model.modules())
    [warning] = warnings_of(caplog)
    assert "plain torch" in warning
    check_equal(served(engine), usual)
