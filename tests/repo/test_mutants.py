"""The quick tests notice faults put into the core on purpose (`tests/mutants.py`)."""

from collections.abc import Callable

import pytest

from tests.mutants import MUTANTS, survives
from tests.support.tree import ROOT


def test_a_fault_is_noticed(record_property: Callable[[str, object], None]) -> None:
    """One of the list; the others run in the long tier."""
    record_property("size", f"faults in the core: 1 of {len(MUTANTS)}")
    assert not survives(MUTANTS[0])


def test_each_fault_has_its_place() -> None:
    """What is to be replaced is in the code, once."""
    assert [m.name for m in MUTANTS if (ROOT / m.path).read_text(encoding="utf-8").count(m.old) != 1] == []


@pytest.mark.long
@pytest.mark.timeout(1_800)
def test_all_faults_are_noticed(record_property: Callable[[str, object], None]) -> None:
    """Each fault fails a test of the quick tier."""
    record_property("size", f"faults in the core: {len(MUTANTS)}")
    assert [mutant.name for mutant in MUTANTS if survives(mutant)] == []
