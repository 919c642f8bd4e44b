"""PEFT's own adapters for tests: made and saved by `peft`, and run by it as the oracle."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model

from tests.support.checkpoints import load_reference


@contextmanager
def _peft_is_behind() -> Iterator[None]:
    """PEFT calls transformers by names that transformers is about to drop."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


def make_adapter(base: Path, folder: Path, seed: int, **config: Any) -> Path:
    """Saves an adapter of the model in `base` whose matrices are all random; `config`: fields of LoraConfig. Returns `folder`."""
    with torch.random.fork_rng(), _peft_is_behind():
        torch.manual_seed(seed)
        model = load_reference(base)
        made = get_peft_model(model, LoraConfig(init_lora_weights=False, task_type="CAUSAL_LM", **config))
        made.save_pretrained(folder, save_embedding_layers=False)
    return folder


class Oracle:
    """A model run by transformers and PEFT, one sequence at a time."""

    def __init__(self, base: Path, adapters: dict[int, Path]) -> None:
        self._model = load_reference(base)
        with _peft_is_behind():
            for adapter_id, folder in adapters.items():
                if isinstance(self._model, PeftModel):
                    self._model.load_adapter(folder, str(adapter_id))
                else:
                    self._model = PeftModel.from_pretrained(self._model, folder, str(adapter_id))
        self._model.eval()

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int], adapter_id: int) -> torch.Tensor:
        """Float32 [len(token_ids), vocab] under one adapter, 0 = the base."""
        given = torch.tensor([list(token_ids)])
        if adapter_id == 0:
            with self._model.disable_adapter():
                return self._model(input_ids=given).logits[0]
        self._model.set_adapter(str(adapter_id))
        return self._model(input_ids=given).logits[0]
