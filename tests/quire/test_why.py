"""A timeline in words (design.md 4, Explain): what `quire why` says of a reason is made of the numbers that decided."""

import pytest
from rich.console import Console

from protos.inference.v1 import admin_pb2
from quire.why import why_table
from scheduler_svc.admin.messages import numbers_message
from scheduler_svc.core.reasons import Numbers

BLOCKS = {"need": 4, "free": 4, "watermark": 1}


@pytest.mark.parametrize(
    ("reason", "numbers", "words"),
    [
        ("NEED_BLOCKS", BLOCKS, "4 blocks needed, 4 free, 1 kept back"),
        (
            "BEHIND",
            {"head": "a", "head_reason": "NEED_BLOCKS", **BLOCKS},
            "behind a: 4 blocks needed, 4 free, 1 kept back",
        ),
        ("BEHIND", {"head": "a", "head_reason": "LATELY_MADE_UP"}, "behind a: LATELY_MADE_UP"),
        ("PREEMPTED", {"mode": "swap", "by": "b", "blocks": 3}, "it made room for b: 3 blocks went to the host"),
        (
            "PREEMPTED",
            {"mode": "recompute", "by": "b", "lost_tokens": 9},
            "it made room for b: 9 tokens to compute again",
        ),
        ("PREEMPTED", {"mode": "swap"}, "it had to leave (swap)"),
        ("LATELY_MADE_UP", {"a": 1, "b": "c"}, "a 1, b c"),
    ],
)
def test_reasons_in_words(reason: str, numbers: Numbers, words: str) -> None:
    """With fewer numbers than words want, or a reason from a later release, there is less to read and no error."""
    episode = admin_pb2.Episode(from_step=1, queue="waiting", reason=reason, numbers=numbers_message(numbers))
    console = Console(width=160, record=True, file=None)
    with console.capture() as told:
        console.print(why_table(admin_pb2.ExplainRequestResponse(id="r", episodes=[episode])))
    assert f" {words} " in told.get()
