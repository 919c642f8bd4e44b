"""Memory report of a recorded scenario of family v0, from its block tables right after each schedule().

A recording has no token counts. Under v0 all sequences of a request advance together, so each has its prompt
and one token for each earlier step that sampled it; a token without a slot does not count.
"""

import json
from pathlib import Path
from typing import Any

import typer

from block_manager.memory_report import HeldSequence, PagedMemory, paged_memory

_FAMILIES = ("v0", "v0bm1")


def report(path: Path) -> dict[str, Any]:
    """`{name, steps: [...]}`: per step its number, blocks, saved share and waste. Raises BadParameter for other files."""
    try:
        scenario = json.loads(path.read_text(encoding="utf-8"))
        family = scenario["family"]
    except (ValueError, TypeError, KeyError) as error:
        raise typer.BadParameter(f"{path} is not a recorded scenario: {error!r}") from error
    if family not in _FAMILIES or "trace" not in scenario:
        raise typer.BadParameter(
            f"{path}: field 'family' must be one of {', '.join(_FAMILIES)}, with a trace; not {family!r}"
        )
    if scenario["config"].get("sliding_window"):
        raise typer.BadParameter(
            f"{path}: field 'config.sliding_window': its tables contain a null block that no sequence owns"
        )
    block_size = scenario["config"]["block_size"]
    num_tokens = {request["id"]: len(request["prompt"]) for request in scenario["requests"]}
    steps = []
    for record in scenario["trace"]:
        if "tables" in record:
            steps.append({"step": record["step"], **_row(_memory(record, num_tokens, block_size))})
            for entry in record["scheduled"]:
                num_tokens[entry["id"]] += entry["sample"]
    return {"name": scenario["name"], "steps": steps}


def _memory(record: dict[str, Any], num_tokens: dict[str, int], block_size: int) -> PagedMemory:
    """Memory of the device: blocks with names that begin with "g"."""
    held = [
        HeldSequence(blocks, num_tokens[name.rpartition("/")[0]])
        for name, blocks in record["tables"].items()
        if all(block.startswith("g") for block in blocks)
    ]
    return paged_memory(held, block_size)


def _row(memory: PagedMemory) -> dict[str, Any]:
    return {
        "logical_blocks": memory.logical_blocks,
        "physical_blocks": memory.physical_blocks,
        "saved": memory.saved,
        "waste_tokens": memory.waste_tokens,
        "max_waste_tokens": memory.max_waste_tokens,
    }
