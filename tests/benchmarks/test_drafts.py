"""`python -m benchmarks.drafts`: models that learn a language propose what saves steps, and change no token."""

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.drafts.__main__ import measure


@pytest.mark.long
@pytest.mark.timeout(300)
def test_drafts_of_models_save_steps(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    """At least 30 % of the steps, by a draft model and by an MTP head. `measure` compares the tokens with those without drafts."""
    batches, requests = 500, 12
    found = measure(tmp_path, batches=batches, num_drafts=3, requests=requests, temperature=0.7)
    for name in ("model", "mtp"):
        assert found[name]["saved"] >= 0.3
    record_property("size", f"{requests} requests after {batches} batches: {found}")
