"""Models that also take images are served as text models: equal to `generate`, without what only images need."""

import logging

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.mistral3 import modeling_mistral3

from quire_tools.plan.model_sizes import model_sizes
from svc_common.errors import ConfigError
from tests.support.quantized_files import fp8_blocks, gptq, stored_so
from tests.support.worker import generated
from tests.support.worker.driver import Driver, generate, make_engine, new_engine
from tests.support.worker.rank_group import running
from tests.support.worker.rank_runs import check_chunks
from tests.support.wrapped_checkpoints import WRAPPED, make_wrapped
from tests.worker.engine.families import Family
from tests.worker.engine.test_families import check_lives, make_world
from worker_svc.model import checkpoint
from worker_svc.model.decoder import text_half

_TOKENS = 8
_QUICK = ("qwen3_vl", "mistral3", "gemma3")
_FUSED = {"qwen3_vl", "qwen3_vl_moe", "mistral3", "gemma3", "llava", "internvl"}


@pytest.mark.parametrize("name", [n if n in _QUICK else pytest.param(n, marks=pytest.mark.long) for n in WRAPPED])
def test_text_equals_generate(name, tmp_path, record_property):
    """Tokens of the whole model's own `generate` for text, whatever a scheduler does to rows; as one program where the
    decoder alone would be."""
    world = make_world(Family(name, make_wrapped(name, tmp_path / "m")), _TOKENS)
    size = check_lives(world, seeds=range(1), num_tokens=_TOKENS, poisoned=True)
    assert world.engine._loaded.model.is_fused == (name in _FUSED)
    record_property("size", f"text of a model with images equals generate: {size}")


@pytest.mark.parametrize("name", ["qwen3_vl", "mistral3"])
def test_towers_are_not_read(name, tmp_path, caplog):
    """Without the tensors of the tower and the projector in its file the model loads too, with the same weights; the log names the
    parts, and transformers does not warn of them."""
    path = make_wrapped(name, tmp_path / "m")
    with caplog.at_level(logging.INFO):
        whole = loaded(path)
    assert "is served as a text model; not loaded, because other inputs need it: model.vis" in caplog.text
    assert "UNEXPECTED" not in caplog.text
    file = path / "model.safetensors"
    tensors = load_file(file)
    kept = {key: tensor for key, tensor in tensors.items() if "vis" not in key and "projector" not in key}
    assert len(kept) < len(tensors)
    save_file(kept, file, metadata={"format": "pt"})
    assert loaded(path).model.weight_bytes == whole.model.weight_bytes
    assert whole.model.weight_bytes < sum(tensor.nbytes for tensor in tensors.values())


def loaded(path):
    engine = new_engine(path)
    engine.load(lambda _stage, _fraction: None)
    return engine._loaded


@pytest.mark.parametrize("name", WRAPPED)
def test_only_what_is_read_is_counted(name, tmp_path):
    """The check of memory before weights are read, and `quire plan`, count the text's weights."""
    path = make_wrapped(name, tmp_path / "m")
    found = checkpoint.open_checkpoint(path)
    num_read = text_half.num_read(checkpoint.model_class(found), found.config)
    sizes = model_sizes(path, dtype="float32", kv_cache_dtype="auto", max_model_len=None)
    assert 4 * num_read < found.loaded_bytes(torch.float32)
    assert 4 * num_read <= sizes.loaded_bytes < 4 * num_read + 4096  # that of buffers is in the plan


@pytest.mark.parametrize("ranks", [(1, 2), (2, 1)], ids=str)
@pytest.mark.parametrize("name", ["mistral3", "gemma3"])
@pytest.mark.long
def test_ranks_and_stages(name, ranks, tmp_path):
    """In stages, and by ranks that divide heads, tokens are those of `generate`."""
    path, (tensor, stages) = make_wrapped(name, tmp_path / "m"), ranks
    with running(path, tensor, pipeline_parallel=stages) as group:
        check_chunks(Driver(group), path)


@pytest.mark.parametrize(
    "name", ["mistral3", *(pytest.param(n, marks=pytest.mark.long) for n in ("qwen3_vl", "gemma3"))]
)
@pytest.mark.parametrize("stored", [gptq(4, 32, sym=True), fp8_blocks((64, 64))], ids=["gptq", "fp8"])
def test_quantized_weights(name, stored, tmp_path):
    """Of the text, whether the tower's are quantized too: tokens are those of the values that are meant."""
    source = make_wrapped(name, tmp_path / "source", hidden_size=128, intermediate_size=256)
    path = stored_so(source, tmp_path / "stored", stored, keeps=("lm_head", "embed"))
    prompt = list(range(40, 75))
    driver = Driver(make_engine(path, dtype="float32", fuse=False))
    generate(driver, "p", prompt, 12)
    generated.greedy(generated.reference_model(source), prompt, 12).check(driver.tokens["p"], driver.logprobs["p"])


def test_a_plain_model_reads_all(families):
    """Nothing is left out of a model of text alone."""
    found = checkpoint.open_checkpoint(families["llama"].path)
    assert text_half.num_read(checkpoint.model_class(found), found.config) is None


def test_text_that_passes_a_part_which_is_not_loaded(tmp_path, monkeypatch):
    """A model that needs its projector for text is refused, with the part's name."""
    inner = modeling_mistral3.Mistral3Model.forward

    def through_the_projector(self, *given, **named):
        out = inner(self, *given, **named)
        self.multi_modal_projector(out.last_hidden_state)
        return out

    monkeypatch.setattr(modeling_mistral3.Mistral3Model, "forward", through_the_projector)
    with pytest.raises(ConfigError, match=r"passes text through model.multi_modal_projector") as caught:
        loaded(make_wrapped("mistral3", tmp_path / "m"))
    assert caught.value.reason == "MODEL_UNSUPPORTED"
