"""The scheduler's settings as `quire up`, `quire serve scheduler` and `LLM` take them: one default, one refusal for all three."""

from typing import Any

from quire.settings import Spelling, settings_of
from scheduler_svc.core import presets
from scheduler_svc.settings import SchedulerSettings
from svc_common.errors import ConfigError


def scheduler_settings(spelled: Spelling, **values: Any) -> SchedulerSettings:
    """SchedulerSettings from `values` (None = not given); ConfigError, by the names of `spelled`, for what cannot work.

    `max_num_seqs` not given: its default, or the token budget where that is less, as each running sequence needs a token per
    step (R48). Given and above the budget, it is refused.
    """
    settings = settings_of(SchedulerSettings, spelled, **values)
    budget = settings.max_num_batched_tokens
    if values.get("max_num_seqs") is None:
        settings = settings.model_copy(update={"max_num_seqs": min(settings.max_num_seqs, budget)})
    if budget < settings.max_num_seqs:
        raise ConfigError(
            f"{spelled('max_num_batched_tokens')} ({budget}) must not be less than {spelled('max_num_seqs')} "
            f"({settings.max_num_seqs}): every running sequence needs one token per step",
            reason="BAD_LIMIT",
        )
    if settings.policy not in presets.policy_names():
        raise ConfigError(
            f"{spelled('policy')}: unknown policy {settings.policy!r}; there are: {', '.join(presets.policy_names())}",
            reason="UNKNOWN_POLICY",
        )
    return settings
