"""Forms in which a class is tried: the tiny default, and others that its configuration allows.

A class may be right in its default form and wrong in another, as the first served PhiMoE was with its window.
"""

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.support.checkpoints import SLIDING_WINDOW
from tests.worker.families.tiny_configs import Fields, merged, tiny_config

DEFAULT, WINDOWS = "default", "windows"
_FULL, _SLIDING = "full_attention", "sliding_attention"
_STATES = {"linear_attention", "conv", "hybrid"}


def forms_of(model_type: str) -> dict[str, Fields]:
    """Configurations of this type by the names of their forms."""
    plain = tiny_config(model_type)
    forms = {DEFAULT: plain}
    if windows := _windows(plain):
        forms[WINDOWS] = merged(plain, windows)
    return forms


def _windows(plain: Fields) -> Fields:
    """A window in every second layer, or in all where layers have no types; empty if the class has one already, or none."""
    config = CONFIG_MAPPING[plain["model_type"]](**{n: v for n, v in plain.items() if n != "model_type"})
    types = list(getattr(config, "layer_types", None) or ())
    if (
        _STATES & set(types)
        or not hasattr(config, "sliding_window")
        or _SLIDING in types
        or (config.sliding_window and not types)
    ):
        return {}
    found: Fields = {"sliding_window": SLIDING_WINDOW}
    if hasattr(config, "use_sliding_window"):
        found["use_sliding_window"] = True
    if types:
        found["layer_types"] = [_SLIDING if i % 2 else kind for i, kind in enumerate(types)]
        rope = getattr(config, "rope_parameters", None) or {}
        if isinstance(rope.get(_FULL), dict) and not rope.get(_SLIDING):
            found["rope_parameters"] = {_SLIDING: dict(rope[_FULL])}
    return found
