"""The benchmark of calls per token: its windows and figures, and a small run through real processes."""

import json
from pathlib import Path

import pytest

from benchmarks.call_path import __main__ as call_path
from benchmarks.call_path.trace import CallLog, LoggedCalls
from svc_common import wire_arrays


def test_calls_of_services_are_logged(tmp_path: Path) -> None:
    """A function of a service is logged under its path each time; one of this test is not."""
    log = CallLog()
    with log.kept(tmp_path / "log.json"):
        for _ in range(3):
            wire_arrays.pack([1])
    found = LoggedCalls.read(tmp_path / "log.json")
    assert found.between(0, 2**63)["svc_common/wire_arrays.py:pack"] == 3
    assert not [function for function in found.functions if function.startswith("tests/")]


def test_a_window_has_the_calls_from_its_begin_to_before_its_end() -> None:
    """Counted by function; the first call of a name is found wherever it is defined."""
    log = LoggedCalls(["a.py:f", "b.py:Core.schedule"], [(10, 0), (20, 1), (30, 0), (40, 0)], [])
    assert log.between(10, 40) == {"a.py:f": 2, "b.py:Core.schedule": 1}
    assert log.first("schedule", 15) == 20
    with pytest.raises(ValueError, match="schedule"):
        log.first("schedule", 25)


@pytest.mark.long
def test_a_small_run_is_plausible() -> None:
    """Each service is on the way of a token and a cancel; gateway and scheduler on that of a request."""
    found = call_path._figures(call_path.measure(24, 1), verbose=True)
    assert json.loads(json.dumps(found)) == found
    for path, services in (("token", 3), ("request", 2), ("cancel", 3)):
        figures = [found[path][name] for name in call_path.SERVICES if name in found[path]]
        assert len(figures) == services
        assert all(0 < each["files"] <= each["calls"] < 2_000 for each in figures), path
        assert found[path]["all"]["calls"] == sum(each["calls"] for each in figures)
    assert "worker_svc/executor/model_engine.py:ModelEngine.launch" in found["token"]["functions"]["worker"]
    assert found["token"]["functions"]["worker"]["worker_svc/executor/model_engine.py:ModelEngine.launch"] == 1
