"""The scheduler's settings as given to `quire up`, `quire serve scheduler` and `LLM`.

All three have the same defaults and checks.
"""

from typing import Any

from quire.settings import Spelling, settings_of
from scheduler_svc.policy.assembly import policy_of
from scheduler_svc.settings import SchedulerSettings


def scheduler_settings(spelled: Spelling, **values: Any) -> SchedulerSettings:
    """SchedulerSettings from `values` (None = not given).

    Raises ConfigError, with names spelled by `spelled`, for what cannot work. `max_num_seqs` not given: its
    default, or the token budget if that is less, as each running sequence needs a token per step. Given and
    above the budget, it is refused.
    """
    settings = settings_of(SchedulerSettings, spelled, **values)
    policy_of(settings, spelled)
    return settings
