"""Containers of a core's objects are read as they were written."""

from collections import Counter, OrderedDict, deque

import pytest

from scheduler_svc.observe.recording.object_graph import GraphReader, GraphWriter


@pytest.mark.parametrize(
    "value",
    [
        {"a": 1, 2: [3, None]},
        Counter({("r1/0", 6): 3, ("r2/0", 1): 1}),
        OrderedDict([("z", 1), ("a", (2, b"x"))]),
        [1, {"one", "two"}, frozenset({3})],
        deque([True, "last"]),
        [*range(-5, 200)],
        [*range(100), 2**40],
        [*range(100), True],
        {i: i * i for i in range(100)},
        {bytes([i] * 16): [i] for i in range(100)},
        [None if i % 3 else bytes([i] * 8) for i in range(100)],
        [bytes(i) for i in range(100)],
        [b""] * 100,
        [None] * 100,
        set(range(100)),
    ],
    ids=lambda value: f"{type(value).__name__} of {len(value)}",
)
def test_containers(value: object) -> None:
    """Equal, of the same kind and in the same order; a Counter keeps its counts."""
    document = GraphWriter({}, ()).document([value] if isinstance(value, list) else {"it": value})
    read = GraphReader(document, {}).root()
    [found] = read if isinstance(read, list) else read.values()
    assert type(found) is type(value)
    assert found == value
    if isinstance(value, dict | deque):
        assert list(found) == list(value)
