"""The model that comes with a checkout: what everything runs on where nobody names another."""

from pathlib import Path

from svc_common.errors import ConfigError

_BUILT_IN_MODEL = Path(__file__).resolve().parent.parent / "models" / "tiny"


def default_model() -> Path:
    """The built-in model of this checkout; ConfigError where there is none (an installation without it)."""
    if not (_BUILT_IN_MODEL / "config.json").is_file():
        raise ConfigError("there is no built-in model here; name a checkpoint folder with --model", reason="NO_MODEL")
    return _BUILT_IN_MODEL
