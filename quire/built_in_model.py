"""The model that comes with Quire, served if no other is named."""

from importlib.resources import files
from pathlib import Path

from svc_common.errors import ConfigError


def default_model() -> Path:
    """Folder of the built-in model: package data in a wheel, `models/tiny` in a checkout.

    Raises ConfigError if an image was made without it.
    """
    folder = Path(str(files("quire") / "tiny")).resolve()
    if not (folder / "config.json").is_file():
        raise ConfigError("there is no built-in model here; name a checkpoint folder with --model", reason="NO_MODEL")
    return folder
