"""One default and one refusal of step limits for `quire up`, `quire serve scheduler` and `LLM`."""

import pytest

from quire.local_stack.stack_options import StackOptions
from quire.scheduling import scheduler_settings
from quire.settings import option_name
from scheduler_svc.policy.assembly import policy_of
from svc_common.errors import ConfigError


@pytest.mark.parametrize(
    ("seqs", "tokens", "expected"),
    [
        (None, None, (256, 2048)),
        (None, 40, (40, 40)),
        (None, 4096, (256, 4096)),
        (8, 64, (8, 64)),
        (300, None, (300, 2048)),
    ],
)
def test_sequences_follow_the_budget_unless_given(
    seqs: int | None, tokens: int | None, expected: tuple[int, int]
) -> None:
    """Not given: the default or the budget, whichever is less; alike from the fields and from the scheduler's arguments."""
    settings = scheduler_settings(str, max_num_seqs=seqs, max_num_batched_tokens=tokens)
    assert policy_of(settings).largest_step(4096) == expected[::-1]
    given = {"--max-num-seqs": seqs, "--max-num-batched-tokens": tokens}
    arguments = [part for name, value in given.items() if value is not None for part in (name, str(value))]
    fields = StackOptions(simulated=True, max_num_seqs=seqs, max_num_batched_tokens=tokens)
    for options in (fields, StackOptions(simulated=True, scheduler_args=arguments)):
        assert options.choice.largest_step(4096) == expected[::-1]
        command = options.commands(dict.fromkeys(options.wanted_ports, 1))["scheduler"]
        said = {name: command[command.index(name) + 1] if name in command else None for name in given}
        assert said == {name: None if value is None else str(value) for name, value in given.items()}


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"max_num_seqs": 0}, "^--max-num-seqs: .*given: 0"),
        ({"max_num_batched_tokens": 0}, "^--max-num-batched-tokens: .*given: 0"),
        (
            {"max_num_seqs": 41, "max_num_batched_tokens": 40},
            r"^--max-num-batched-tokens \(40\) .*--max-num-seqs \(41\)",
        ),
        ({"max_num_seqs": 4096}, r"^--max-num-batched-tokens \(2048\)"),
    ],
)
def test_what_cannot_work_is_refused(values: dict[str, int], text: str) -> None:
    """Zero is a number, not "not given"; a contradiction of two given numbers stays one."""
    with pytest.raises(ConfigError, match=text):
        scheduler_settings(option_name, **values)
    with pytest.raises(ConfigError, match=text):
        _ = StackOptions(simulated=True, **values).choice  # type: ignore[arg-type]
