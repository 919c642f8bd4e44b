"""The scheduler's settings as `quire up`, `quire serve scheduler` and `LLM` take them: one default, one refusal for all three."""

from typing import Any

from quire.settings import Spelling, settings_of
from scheduler_svc.settings import SchedulerSettings


def scheduler_settings(spelled: Spelling, **values: Any) -> SchedulerSettings:
    """SchedulerSettings from `values` (None = not given); ConfigError, by the names of `spelled`, for what cannot work.

    `max_num_seqs` not given: its default, or the token budget where that is less, as each running sequence needs a token per
    step (R48). Given and above the budget, it is refused.
    """
    settings = settings_of(SchedulerSettings, spelled, **values)
    settings.policy_choice(spelled)
    return settings
