"""What a container lets a process use."""

import os

import pytest

from worker_svc import container


@pytest.mark.parametrize(
    ("given", "wanted"), [("3", 3), ("5,2", 5), (" 4 ", 4), ("0", None), ("many", None), ("", None)]
)
def test_threads_are_those_of_openmp_or_the_processors(
    given: str, wanted: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first level of OMP_NUM_THREADS; what OpenMP itself would refuse counts as not set."""
    monkeypatch.setattr(container, "num_processors", lambda: 7)
    monkeypatch.setitem(os.environ, "OMP_NUM_THREADS", given)
    assert container.num_compute_threads() == (wanted or 7)
