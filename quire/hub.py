"""Resolves `--model`: a checkpoint folder, or a model on the hub, ORG/NAME, downloaded before anything starts.

The launcher downloads (`quire up`, `serve worker`, `plan`, `bench --up`); services are given a folder. Not
here: the download itself (quire.hub_download), which needs huggingface_hub.
"""

import importlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from quire import extras
from quire.built_in_model import default_model
from svc_common.errors import ConfigError

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A model's folder. `name`: served name unless another is given; empty = the folder's name."""

    path: Path
    name: str = ""

    @property
    def name_arguments(self) -> Sequence[str]:
        """Arguments of `quire serve worker` that serve the model under its name."""
        return ("--served-model-name", self.name) if self.name else ()


def is_hub_name(model: str) -> bool:
    """True if `model` has the form ORG/NAME and is not a local path."""
    return _HUB_NAME.fullmatch(model) is not None and not Path(model).exists()


def checkpoint_folder(model: Path | str | None, revision: str = "", *, weights: bool = True) -> ModelFolder:
    """The folder of `model`; None = the built-in one. A hub model is downloaded, or found in the cache.

    `revision`: a branch, tag or commit of the hub; empty = the newest. `weights`: False = configuration and
    tokenizer only. Raises ConfigError for a path that does not exist and an unknown name or revision,
    Unavailable if the hub cannot be reached.
    """
    if model is not None and is_hub_name(str(model)):
        return ModelFolder(_download(str(model), revision, weights=weights), str(model))
    if revision:
        raise ConfigError("--revision goes with --model ORG/NAME, a model of the hub", reason="INVALID_SETTING")
    path = default_model() if model is None else Path(model).expanduser()
    if not path.exists():
        what = f"--model {path} does not exist; give the folder of a checkpoint, or a .gguf file"
        raise ConfigError(what, reason="MODEL_NOT_FOUND", metadata={"model": str(path)})
    return ModelFolder(path)


def _download(name: str, revision: str, *, weights: bool) -> Path:
    extras.require(f"--model {name} is no folder here, and its download", "worker")
    download = importlib.import_module("quire.hub_download")  # an optional package
    found: Path = download.download(name, revision or None, weights=weights)
    return found
