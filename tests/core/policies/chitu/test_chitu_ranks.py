"""Chitu's data-parallel scheduler: sticky owners, chunks per rank, one plan for every rank (R188-R195)."""

import pytest

from tests.support.core.task_builders import Share, Tasks, ids, shares


class RankPlace(Tasks):
    """Two ranks for four tasks, unless told otherwise."""

    def __init__(self, **knobs: object) -> None:
        super().__init__("chitu-dp", **{"dp_size": 2, "max_reqs": 4, "max_num_seqs": 16, **knobs})

    def lists(self) -> list[list[Share]]:
        """The next step by rank; its results are there at once."""
        self.step()
        return [shares(plan) for plan in self.plans]

    def names(self) -> list[list[str]]:
        """Tasks that run in the next step, by rank."""
        return [ids(of_rank) for of_rank in self.lists()]


@pytest.mark.parametrize(("max_reqs", "dp_size", "most"), [(4, 2, 2), (5, 2, 3), (3, 4, 1)])
def test_each_rank_has_its_list(max_reqs: int, dp_size: int, most: int) -> None:
    """R188, R192: at most ceil(max_reqs / ranks) tasks in each, prefills and decodes."""
    tasks = RankPlace(max_reqs=max_reqs, dp_size=dp_size)
    for i in range(15):
        tasks.add(f"t{i}", max_tokens=9)
    prefills, decodes = tasks.names(), tasks.names()
    assert [len(names) for names in prefills] == [len(names) for names in decodes] == [most] * dp_size


def test_the_oldest_start_first() -> None:
    """R189: by the time the request began, ties as they came; scorers and priorities play no part."""
    tasks = RankPlace(scheduler_type="request_preset", max_reqs=2)
    for name, arrival, priority in (("a", 3.0, 9), ("b", 1.0, 1), ("c", 1.0, 5), ("d", 2.0, 7)):
        tasks.add(name, arrival=arrival, priority=priority)
    assert tasks.names() == [["b"], ["c"]]


def test_prefill_work_anywhere_idles_the_others() -> None:
    """R189: rank 1 has only decodes, and waits."""
    tasks = RankPlace()
    tasks.add("a", max_tokens=9)
    tasks.add("b", max_tokens=9)
    assert tasks.names() == [["a"], ["b"]]
    tasks.add("c")
    assert tasks.names() == [["c"], []]
    assert tasks.names() == [["a", "c"], ["b"]]


def test_owners_are_probed_from_the_cursor_and_stay() -> None:
    """R190: the cursor moves on by one for each rank probed; a full rank is passed; the owner is for life."""
    tasks = RankPlace(dp_size=3, max_reqs=6)
    for name in "abcd":
        tasks.add(name, max_tokens=9)
    assert tasks.names() == [["a", "d"], ["b"], ["c"]] and tasks["cursor"] == 1
    for name in "efg":
        tasks.add(name, max_tokens=9)
    assert tasks.names() == [[], ["e"], ["f"]]
    assert tasks["cursor"] == 0 and tasks.group("g").lane is None
    assert tasks.names() == [["a", "d"], ["b", "e"], ["c", "f"]]
    tasks.core.abort(["d"])
    assert tasks.names() == [["g"], [], []] and tasks["cursor"] == 1


def test_with_no_rank_free_the_cursor_is_where_it_was() -> None:
    """R190: all are probed once, none has room."""
    tasks = RankPlace(max_reqs=2)
    for name in "abc":
        tasks.add(name, max_tokens=9)
    tasks.step()
    before = tasks["cursor"]
    tasks.step()
    assert (tasks["cursor"], tasks.group("c").lane) == (before, None)


def test_the_chunk_is_shared_by_the_ranks() -> None:
    """R191: a share each, the remainder to rank 0; given in order."""
    tasks = RankPlace(dp_size=3, max_reqs=6, prefill_chunk_size=8)
    for i in range(6):
        tasks.add(f"t{i}", 3, max_tokens=9)
    assert tasks.lists() == [
        [("t0", "P", 0, 3), ("t3", "P", 0, 1)],
        [("t1", "P", 0, 2)],
        [("t2", "P", 0, 2)],
    ]
    assert tasks.lists()[1] == [("t1", "P", 2, 1), ("t4", "P", 0, 1)]


def test_decodes_by_owner_when_there_is_no_prefill() -> None:
    """R193: in pool order; while warming up nothing runs instead."""
    tasks = RankPlace()
    for name, arrival in (("a", 2.0), ("b", 1.0)):
        tasks.add(name, max_tokens=9, arrival=arrival)
    assert tasks.names() == [["b"], ["a"]]
    tasks.core.warm_up(on=True)
    assert tasks.names() == [[], []]
    tasks.core.warm_up(on=False)
    assert tasks.names() == [["b"], ["a"]]


def test_warming_up_may_last() -> None:
    """R193: no task is given up because nothing runs meanwhile."""
    tasks = RankPlace()
    tasks.add("a", max_tokens=9)
    tasks.step()
    tasks.core.warm_up(on=True)
    for _ in range(20):
        assert tasks.names() == [[], []]
    tasks.core.warm_up(on=False)
    assert tasks.names() == [["a"], []]


def test_every_rank_gets_a_plan() -> None:
    """R194: one for each, in order, empty ones too: a rank without work still takes part."""
    tasks = RankPlace(dp_size=3, max_reqs=3)
    tasks.add("a")
    tasks.plan()
    assert [(plan.lane, plan.is_empty) for plan in tasks.plans] == [(0, False), (1, True), (2, True)]
    assert len({plan.step for plan in tasks.plans}) == 3


def test_the_collector_holds_one_step() -> None:
    """R195: lists are decided once for all ranks, and anew for the next step."""
    tasks = RankPlace(max_reqs=2)
    tasks.add("a", max_tokens=3)
    tasks.add("b", max_tokens=2)
    assert tasks.names() == [["a"], ["b"]]
    assert tasks.names() == [["a"], ["b"]]
    assert tasks.names() == [["a"], []]
    assert tasks.names() == [[], []]


def test_only_the_own_rank_is_told_to_forget() -> None:
    """R194: each worker hears of its own sequences."""
    tasks = RankPlace(max_reqs=2)
    tasks.add("a", max_tokens=2)
    tasks.add("b", max_tokens=2)
    tasks.step()
    tasks.step()
    tasks.plan()
    assert [plan.left for plan in tasks.plans] == [["a/0"], ["b/0"]]


def test_ranks_have_blocks_of_their_own() -> None:
    """R190: block ids count from each rank's first; a task is taken where its whole life fits."""
    tasks = RankPlace(num_blocks=4, max_reqs=6)
    for name in "abc":
        tasks.add(name, 8, max_tokens=9)
    assert tasks.names() == [["a"], ["b"]] and tasks.group("c").lane is None
    assert tasks.core.block_tables() == {"a/0": ["g1@0", "g2@0"], "b/0": ["g1@1", "g2@1"]}
    report = tasks.core.pool_report()
    assert (report.gpu.total, report.gpu.free) == (8, 4)
    assert tasks.core.check_integrity() == []
    tasks.run()
    assert tasks.core.pool_report().gpu.free == 8
