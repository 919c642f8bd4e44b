"""The same four requests step by step: static batches, where all wait for the slowest, and continuous ones (R1)."""

import pytest

from tests.support.core.v0_builders import add, chunks, finish, make_v0, one_step

Step = tuple[dict[str, int], list[str]]

STATIC: list[Step] = [
    ({"a": 3, "b": 3}, []),
    ({"a": 1, "b": 1}, ["a"]),
    ({"b": 1}, []),
    ({"b": 1}, []),
    ({"b": 1}, []),
    ({"b": 1}, ["b"]),
    ({"c": 3, "d": 3}, ["d"]),
    ({"c": 1}, []),
    ({"c": 1}, ["c"]),
]
MIXED: list[Step] = [
    ({"a": 3, "b": 3}, []),
    ({"a": 1, "b": 1}, ["a"]),
    ({"b": 1, "c": 3}, []),
    ({"b": 1, "c": 1}, []),
    ({"b": 1, "c": 1}, ["c"]),
    ({"b": 1, "d": 3}, ["b", "d"]),
]
PROMPTS_OR_DECODES: list[Step] = [
    ({"a": 3, "b": 3}, []),
    ({"a": 1, "b": 1}, ["a"]),
    ({"c": 3}, []),
    ({"b": 1, "c": 1}, []),
    ({"b": 1, "c": 1}, ["c"]),
    ({"d": 3}, ["d"]),
    ({"b": 1}, []),
    ({"b": 1}, ["b"]),
]
CHUNKED: list[Step] = [
    ({"a": 3, "b": 3}, []),
    ({"a": 1, "b": 1}, ["a"]),
    ({"c": 3, "b": 1}, []),
    ({"b": 1, "c": 1}, []),
    ({"b": 1, "c": 1}, ["c"]),
    ({"d": 3, "b": 1}, ["d", "b"]),
]


@pytest.mark.parametrize(
    ("preset", "expected"),
    [
        ("static", STATIC),
        ("vllm-v1", MIXED),
        ("vllm-v0", PROMPTS_OR_DECODES),
        ("vllm-2023", PROMPTS_OR_DECODES),
        ("vllm-v0-chunked", CHUNKED),
    ],
)
def test_two_slots_and_four_requests(preset: str, expected: list[Step]) -> None:
    """R1, R41, R127: prompts of 3 tokens and 2, 6, 3, 1 output tokens, two at a time. Under `static` c starts only when b, the
    slower one of its batch, is over; under the others in the very next step after a ended."""
    core = make_v0(preset, max_num_seqs=2)
    for name, num_tokens in (("a", 2), ("b", 6), ("c", 3), ("d", 1)):
        add(core, name, 3, num_tokens)
    seen = []
    while core.has_unfinished:
        plan, outcome = one_step(core)
        seen.append((dict(chunks(plan)), [e.request_id for e in outcome.ended]))
    assert seen == expected


@pytest.mark.parametrize("preset", ["vllm-v0", "vllm-2023", "vllm-v0-chunked", "vllm-v1"])
def test_slot_and_blocks_of_a_finished_request_serve_the_next_step(preset: str) -> None:
    """R1, R17: a newcomer that needs all of them starts at once."""
    core = make_v0(preset, max_num_seqs=1, num_gpu_blocks=4 + (preset == "vllm-v1"), max_model_len=32)
    add(core, "a", 12, 1)
    add(core, "b", 13, 1)
    assert [chunks(one_step(core)[0]) for _ in range(2)] == [[("a", 12)], [("b", 13)]]


@pytest.mark.parametrize("preset", ["static", "vllm-v0", "vllm-v1"])
def test_the_timetable_does_not_change_the_tokens(preset: str) -> None:
    """R1, R201: each request gets the tokens of its own."""
    tokens = {}
    for num_slots in (1, 4):
        core = make_v0(preset, max_num_seqs=num_slots)
        for name, num_tokens in (("a", 2), ("b", 6), ("c", 3), ("d", 1)):
            add(core, name, 3, num_tokens)
        tokens[num_slots] = finish(core)
    assert tokens[1] == tokens[4]
    assert [len(tokens[1][f"{name}/0"]) for name in "abcd"] == [2, 6, 3, 1]
