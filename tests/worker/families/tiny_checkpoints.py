"""Tiny random checkpoints of any causal language model class, from the fields of its configuration."""

import json
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.support.checkpoints import STATE_FAMILIES, make_checkpoint, save_random
from tests.worker.families.tiny_configs import Fields, merged, tiny_config


def save_tiny(fields: Fields, path: Path, seed: int) -> Path:
    """Write a tiny random checkpoint into the new folder `path`, and return that. Raises what transformers raises."""
    path.mkdir()
    config = AutoConfig.for_model(**fields)
    save_random(config, path, seed, "float32", vary=vary_constants, auto=AutoModelForCausalLM)
    saved = json.loads((path / "config.json").read_text(encoding="utf-8"))
    if saved["model_type"] != config.model_type:  # of a whole model, of which the class is the text half
        config.architectures = saved["architectures"]
        config.save_pretrained(path)
    return path


def vary_constants(model: PreTrainedModel) -> None:
    """Add noise to weights that are all equal when created (biases, norms, sinks), which would hide that they are lost."""
    for parameter in model.parameters():
        if parameter.is_floating_point() and bool((parameter == parameter.flatten()[:1]).all()):
            parameter.add_(torch.randn_like(parameter), alpha=0.1)


def state_checkpoint(model_type: str, path: Path, **changes: object) -> Path:
    """The checkpoint of a model with states that the table of families has, with other fields where `changes` says so."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return save_tiny(merged(tiny_config(model_type), changes), path, seed=0)


def family_checkpoint(family: str, path: Path) -> Path:
    """The checkpoint with which tests run a family: one of FAMILIES or of STATE_FAMILIES."""
    return (state_checkpoint if family in STATE_FAMILIES else make_checkpoint)(family, path)
