"""A timeline in words: what `quire why` says of a reason is made of the numbers that decided."""

import pytest
from rich.console import Console

from protos.inference.v1 import admin_pb2
from quire.operators.why import why_json, why_table
from scheduler_svc.admin.messages import numbers_message
from scheduler_svc.core.reasons import Numbers

BLOCKS = {"need": 4, "free": 4, "watermark": 1}


@pytest.mark.parametrize(
    ("reason", "numbers", "words"),
    [
        ("NEED_BLOCKS", BLOCKS, "4 blocks needed, 4 free, 1 kept free"),
        (
            "BEHIND",
            {"head": "a", "head_reason": "NEED_BLOCKS", **BLOCKS},
            "behind a: 4 blocks needed, 4 free, 1 kept free",
        ),
        ("BEHIND", {"head": "a", "head_reason": "LATELY_MADE_UP"}, "behind a: LATELY_MADE_UP"),
        ("PREEMPTED", {"mode": "swap", "by": "b", "blocks": 3}, "preempted for b: 3 blocks copied to the host"),
        (
            "PREEMPTED",
            {"mode": "recompute", "by": "b", "lost_tokens": 9},
            "preempted for b: 9 tokens to recompute",
        ),
        ("PREEMPTED", {"mode": "swap"}, "preempted (swap)"),
        ("STEP_GRANTED", {}, "the worker had begun the step by a grant when the revocation reached it"),
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


def _answer(*reasons: str, open_end: bool = False) -> admin_pb2.ExplainRequestResponse:
    """A request that waited for these, ten milliseconds each and two more from one to the next of a kind."""
    answer, now_ns = admin_pb2.ExplainRequestResponse(id="r"), 0
    for i, reason in enumerate(reasons):
        end_ns = now_ns + 10_000_000 + 2_000_000 * i
        numbers = numbers_message(
            {"need": i, "free": 0, "watermark": 1, "budget": 64, "head": f"h{i}", "head_reason": "MAX_SEQS"}
        )
        episode = answer.episodes.add(
            from_step=i, to_step=i + 1, from_ns=now_ns, to_ns=end_ns, queue="waiting", reason=reason, numbers=numbers
        )
        now_ns = end_ns
    if open_end:
        episode.ClearField("to_ns")
        episode.ClearField("to_step")
    return answer


def _told(answer: admin_pb2.ExplainRequestResponse) -> list[list[str]]:
    """Rows of the table: steps, ms, queue, reason, because."""
    table = why_table(answer)
    return [list(row) for row in zip(*(column.cells for column in table.columns), strict=True)]


def test_alternating_reasons_are_one_line() -> None:
    """Forty waits that take turns say how often and how long in all, with the numbers of each reason's longest."""
    answer = _answer("ARRIVED", *("NEED_BLOCKS", "TOKEN_BUDGET") * 20, "RUNNING")
    rows = _told(answer)
    assert [row[3] for row in rows] == ["ARRIVED", "NEED_BLOCKS / TOKEN_BUDGET", "RUNNING"]
    steps, ms, _, _, because = rows[1]
    assert (steps, ms) == ("1..41", f"{sum(10 + 2 * i for i in range(1, 41)):.1f}")
    assert because.startswith("alternating 40 times; at the longest: ") and "39 blocks needed" in because
    assert len(why_json(answer)["episodes"]) == 42, "programs get them all"


def test_what_is_no_repetition_stays_as_it_is() -> None:
    """Three waits, two of a kind, and what still holds have lines of their own."""
    few = _told(_answer("NEED_BLOCKS", "TOKEN_BUDGET", "NEED_BLOCKS", "MAX_SEQS"))
    assert [row[3] for row in few] == ["NEED_BLOCKS", "TOKEN_BUDGET", "NEED_BLOCKS", "MAX_SEQS"]
    still = _told(_answer(*("NEED_BLOCKS", "TOKEN_BUDGET") * 3, open_end=True))
    assert [row[3] for row in still] == ["NEED_BLOCKS / TOKEN_BUDGET", "TOKEN_BUDGET"] and still[-1][1] == "..."


def test_a_row_of_heads_is_one_line() -> None:
    """Behind one head after another that all lack the same."""
    [row] = _told(_answer(*["BEHIND"] * 5))
    assert row[3] == "BEHIND" and row[4].startswith("5 times in a row; at the longest: behind h4")
