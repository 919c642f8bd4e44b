"""The MTP head of a checkpoint: its logits are those of the formulas, and tokens are the same with and without."""

from inspect import signature
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from svc_common.errors import ConfigError
from tests.support.checkpoints import LAYERS, SLIDING_WINDOW, make_checkpoint
from tests.support.mtp_checkpoints import OF_MIMO, OF_QWEN, PARTS, make_mimo, make_mtp_checkpoint, make_qwen3_next
from tests.support.worker.driver import Driver, make_engine
from worker_svc.executor.model_drafts import ModelDrafts
from worker_svc.executor.model_engine import ModelEngine
from worker_svc.model.checkpoint import open_checkpoint
from worker_svc.model.drafts.mtp_head import load_head
from worker_svc.sampling.draft_proposer import DraftAsk

PROMPT = list(b"def main(argv):\n    return 0\n  ")


class DenseHead:
    """The head by the formulas of section 2.2 of the DeepSeek-V3 report, over whole sequences, without a cache."""

    def __init__(self, path: Path, names: dict[str, str], layer: dict[str, str]) -> None:
        """`names`: of its own weights. `layer`: the prefix of its layer, with "", and other names to replace."""
        self.main = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
        weights = load_file(path / "model.safetensors")
        self.parts = {part: weights[f"{name}.weight"] for part, name in names.items()}
        self.config = self.main.config
        longer = AutoConfig.from_pretrained(path, attn_implementation="eager")
        longer.num_hidden_layers = LAYERS + 1
        for field in ("layer_types", "mlp_layer_types"):
            if getattr(longer, field, None):
                setattr(longer, field, [*getattr(longer, field), getattr(longer, field)[-1]])
        renamed = {
            name: tensor for name, tensor in weights.items() if name.removesuffix(".weight") not in names.values()
        }
        for before, after in layer.items():
            new = after or f"model.layers.{LAYERS}."
            renamed = {name.replace(before, new): tensor for name, tensor in renamed.items()}
        whole = type(self.main).from_pretrained(None, config=longer, state_dict=renamed).eval().float()
        self.layer = whole.model.layers[LAYERS]
        self.rotary = self.main.model.rotary_emb
        self.adds_one = type(self.main.model.norm).__name__ == "Qwen3NextRMSNorm"

    def norm(self, x: torch.Tensor, part: str) -> torch.Tensor:
        weight = self.parts[part] + 1 if self.adds_one else self.parts[part]
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.config.rms_norm_eps) * weight

    def states(self, tokens: list[int]) -> torch.Tensor:
        """Last hidden states [n, H] of the model."""
        return self.main.model(torch.tensor([tokens])).last_hidden_state[0]

    def __call__(self, states: torch.Tensor, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Of h[0 .. n - 1] and t[1 .. n]: the head's own states and logits."""
        embedded = self.main.get_input_embeddings()(torch.tensor(tokens))
        joined = torch.cat([self.norm(embedded, PARTS[1]), self.norm(states, PARTS[2])], -1)
        x = (joined @ self.parts[PARTS[0]].T)[None]
        places = torch.arange(len(tokens))[None]
        mask = torch.full((len(tokens), len(tokens)), float("-inf")).triu(1)[None, None]
        kind = {"layer_type": "sliding_attention"} if "layer_type" in signature(self.rotary.forward).parameters else {}
        rotary = self.rotary(x, places, **kind)
        out = self.layer(x, position_embeddings=rotary, attention_mask=mask, position_ids=places)
        out = out[0] if isinstance(out, tuple) else out
        own = self.norm(out[0], PARTS[3])
        return own, self.main.lm_head(own)


def head_of(engine: ModelEngine, monkeypatch: pytest.MonkeyPatch) -> tuple[ModelDrafts, list[torch.Tensor]]:
    """The engine's proposer, and the logits that it will compute."""
    proposer, seen = engine._runner._proposer, []
    assert isinstance(proposer, ModelDrafts)
    compute = proposer.drafts.made.model.logits_and_hidden

    def watched(inputs: object) -> tuple[torch.Tensor, torch.Tensor]:
        found = compute(inputs)
        seen.append(found[0].cpu())
        return found

    monkeypatch.setattr(proposer.drafts.made.model, "logits_and_hidden", watched)
    return proposer, seen


DEEPSEEK = {part: f"model.layers.{LAYERS}.{part}" for part in PARTS}
QWEN = {part: f"mtp.{name}" for part, name in OF_QWEN.items()}


@torch.inference_mode()
@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe", "glm4_moe_lite", "qwen3_next"])
def test_logits_are_those_of_the_formulas(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt in chunks, then two steps: two draft tokens, of which the second has the head's own state. Qwen3-Next's model has
    states of sequences too.
    """
    if family == "qwen3_next":
        path = make_qwen3_next(tmp_path / "model", first="linear_attention")
        dense = DenseHead(path, QWEN, {"mtp.layers.0.": ""})
    else:
        path = make_mtp_checkpoint(family, tmp_path / "model")
        dense = DenseHead(path, DEEPSEEK, {})
    engine = make_engine(path, dtype="float32", drafts="mtp")
    engine.profile(64, 8)  # in a cache of its own, while hidden states would be kept
    engine.allocate(160, 40)
    proposer, seen = head_of(engine, monkeypatch)
    driver = Driver(engine)
    driver.add("other", PROMPT[5:], num_tokens=9)
    row = driver.add("row", PROMPT, num_tokens=3)
    driver.run()
    driver.compute("row", 16)
    driver.run()
    driver.compute("row")
    driver.run()
    driver.compute("row", room=8)
    driver.run()
    tokens = row.token_ids
    assert len(tokens) == len(PROMPT) + 2
    [drafts] = proposer.propose([DraftAsk(row.index, engine._rows.token_ids[row.index, : len(tokens)], 2)])
    states = dense.states(tokens)[:-1]
    own, logits = dense(states, tokens[1:])
    torch.testing.assert_close(seen[0][0], logits[-1], rtol=1e-3, atol=1e-3)
    assert drafts[0] == logits[-1].argmax()
    _, further = dense(torch.cat([states, own[-1:]]), [*tokens[1:], int(drafts[0])])
    torch.testing.assert_close(seen[1][0], further[-1], rtol=1e-3, atol=1e-3)


@torch.inference_mode()
@pytest.mark.parametrize("family", ["qwen3_next", "mimo_v2_flash"])
def test_other_names(family: str, tmp_path: Path) -> None:
    """Norms with weights around zero, a window, no experts: the same formulas, without a cache."""
    if family == "qwen3_next":
        path, prefix, names, kind = make_qwen3_next(tmp_path / "model"), "mtp.", OF_QWEN, "full_attention"
        layer = {"mtp.layers.0.": ""}
    else:
        path, prefix, names, kind = make_mimo(tmp_path / "model"), "model.mtp.layers.0.", OF_MIMO, "sliding_attention"
        layer = {prefix: "", "pre_mlp_layernorm": "post_attention_layernorm"}
    dense = DenseHead(path, {part: f"{prefix}{name}" for part, name in names.items()}, layer)
    ends = dense.main.get_input_embeddings(), dense.main.get_output_embeddings()
    head, config, states_input = load_head(open_checkpoint(path), torch.float32, "eager", ends, None)
    tokens = PROMPT[:SLIDING_WINDOW]  # all within the window
    states = states_input.states = dense.states(tokens)[:-1]
    _, expected = dense(states, tokens[1:])
    torch.testing.assert_close(head(torch.tensor([tokens[1:]])).logits[0], expected, rtol=1e-3, atol=1e-3)
    assert config.layer_types == [kind]


def test_a_checkpoint_without_a_head_is_refused(tmp_path: Path) -> None:
    """The error names the option, and what to use instead."""
    with pytest.raises(ConfigError, match=r"--drafts mtp: .* no MTP head") as caught:
        make_engine(make_checkpoint("deepseek_v3", tmp_path / "model"), drafts="mtp")
    assert caught.value.reason == "DRAFTS_UNSUPPORTED"
