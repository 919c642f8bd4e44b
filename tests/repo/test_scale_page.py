"""docs/scale.md computes with the figures in benchmarks/results, and computes right."""

import json
import math
import re

from tests.support.tree import ROOT

PAGE = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
SHARE = 0.7


def _result(name: str) -> dict:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))


def _row(first_cell: str) -> list[str]:
    line = next(line for line in PAGE.splitlines() if line.startswith(f"| {first_cell} |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def _number(text: str) -> float:
    return float(text.replace(",", ""))


STEP_US = _result("group_load")["runs"][-1]["cpu_us_per_step"]
PER_CORE = 256 / STEP_US * 1e6
RELAYED = _result("relay")["runs"]["single"]["tokens_per_core_s"]


def test_costs_are_those_of_the_results() -> None:
    """Each measured figure is in its file."""
    assert f"{STEP_US:,.0f} us, so {round(PER_CORE, -2):,.0f} tokens/s" in PAGE
    assert f"{RELAYED:,}" in _row("gateway, tokens/s on one core, one token per event")
    coalesced = _result("relay")["runs"]["coalesced"]["tokens_per_core_s"]
    assert f"{coalesced:,}" in _row("gateway, tokens/s on one core, 16 tokens per event")
    assert f"{_result('streams')['runs']['fast']['kib_per_stream']:.0f} KiB" in _row(
        "gateway, memory of an open stream"
    )
    admission = "CPU time to admit a prompt of 1,024 tokens, with hashing of its blocks | 108 us"
    assert admission in (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")


def test_workers_and_gateways_of_a_cell() -> None:
    """Each row of the table."""
    rows = re.findall(r"^\| (\d+) \| (\d+) ms \| ([\d,]+) \| (\d+) \| (\d+) \| ([\d,]+) \|$", PAGE, re.M)
    assert len(rows) == 4
    for sequences, step_ms, tokens_s, workers, gateways, streams in rows:
        made = int(sequences) / int(step_ms) * 1_000
        assert made == _number(tokens_s)
        assert math.floor(SHARE * PER_CORE / made) == int(workers)
        assert math.ceil(int(workers) * made / (SHARE * RELAYED)) == int(gateways)
        assert int(workers) * int(sequences) == _number(streams)


def test_a_thousand_gpus() -> None:
    """The last column follows from the one before."""
    made = 256 / 0.05
    workers, per_cell = 1_000 // 8, math.floor(SHARE * PER_CORE / made)
    cells, gateways = math.ceil(workers / per_cell), math.ceil(per_cell * made / (SHARE * RELAYED))
    expected = {
        "workers": workers,
        "tokens/s": workers * made,
        "workers of a cell": per_cell,
        "cells": cells,
        "schedulers": cells,
        "gateways of a cell": gateways,
        "gateways": cells * gateways,
        "cores for schedulers and gateways": cells * (1 + gateways),
        "open streams": workers * 256,
    }
    part = PAGE.partition("## A thousand GPUs")[2]
    for name, value in expected.items():
        found = re.search(rf"^\| {re.escape(name)} \| .* \| ([\d,]+) \|$", part, re.M)
        assert found and _number(found[1]) == value, name
    assert f"{workers * 256 * 33 / 2**20:.1f} GiB" in part
