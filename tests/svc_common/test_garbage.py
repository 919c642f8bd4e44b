"""Garbage collection of a starting process."""

import gc

from svc_common import garbage


def test_nothing_is_collected_while_modules_are_imported_and_their_objects_are_excluded() -> None:
    """As many objects as start a collection start none; afterwards new ones do."""
    before, collected = gc.get_freeze_count(), gc.get_stats()[0]["collections"]
    with garbage.importing():
        made = [[] for _ in range(2 * garbage.YOUNG_OBJECTS)]
        assert gc.get_stats()[0]["collections"] == collected
    assert gc.isenabled() and gc.get_freeze_count() >= before + len(made)
