"""Numbers of the stops about blocks: `memory`, `sharing`, `cow`, `prefix`."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from block_manager.contiguous import ContiguousDemand, ContiguousRequest, place

Steps = Sequence[Mapping[str, Any]]

_BLOCK_SIZE = 16


def _owner(sequence: str) -> str:
    return sequence.split("/", maxsplit=1)[0]


def _prompt_steps(steps: Steps, name: str) -> list[Mapping[str, Any]]:
    return [group for step in steps for group in step["scheduled"] if group["id"] == name and group["prefill"]]


# --- memory --------------------------------------------------------------------------------------------------------


def _memory(files: Sequence[Steps], printed: Mapping[str, str]) -> dict[str, str]:
    """At the step that the screen names. Lengths are those that the requests came to: each got all tokens it asked for."""
    [steps] = files
    step = next(step for step in steps if step["step"] == int(printed["step"]))
    rooms = {_owner(name): _BLOCK_SIZE * len(blocks) for name, blocks in step["tables"].items()}
    held = {
        group["id"]: min(rooms[group["id"]], group["computed_before"] + group["tokens"] + 1)
        for group in step["scheduled"]
    }
    taken = {block for blocks in step["tables"].values() for block in blocks}
    spare = [rooms[name] - held[name] for name in held]
    contiguous = _contiguous(steps, held, step["free"][0] + len(taken))
    return {
        "sequences": str(len(held)),
        "tokens with a slot": str(sum(held.values())),
        "blocks taken": str(len(taken)),
        "paged: slots without a token": str(sum(spare)),
        "paged: most of one sequence": str(max(spare)),
        "contiguous: slots without a token": str(contiguous.num_slots - contiguous.used),
        "contiguous: requests left out": str(contiguous.num_left_out),
    }


def _contiguous(steps: Steps, held: Mapping[str, int], num_blocks: int) -> Any:
    """The same requests in regions, in the order in which they started; a request that starts later waits."""
    order = list(dict.fromkeys(group["id"] for step in steps for group in step["scheduled"]))
    lengths = {name: _length(steps, name) for name in order}
    last = max(map(order.index, held))
    tenants = [
        ContiguousRequest(ContiguousDemand(1, lengths[name]), (held[name],), lengths[name])
        for name in order
        if name in held
    ]
    waiting = [ContiguousDemand(1, lengths[name]) for name in order[last + 1 :]]
    return place(tenants, waiting, num_blocks * _BLOCK_SIZE)


def _length(steps: Steps, name: str) -> int:
    prompt = sum(group["tokens"] for group in _prompt_steps(steps, name))
    return prompt + sum(len(ids) for step in steps for key, ids in step["sampled"].items() if _owner(key) == name)


# --- sharing -------------------------------------------------------------------------------------------------------


def _sharing(files: Sequence[Steps], printed: Mapping[str, str]) -> dict[str, str]:
    [steps] = files
    found = {}
    for name in ("n2", "n4", "n6", "b4"):
        logical = physical = 0
        for step in steps:
            groups = [group for group in step["scheduled"] if group["id"] == name]
            if not groups or any(group["prefill"] for group in groups):
                continue
            entries = [block for key, blocks in step["tables"].items() if _owner(key) == name for block in blocks]
            logical, physical = logical + len(entries), physical + len(set(entries))
        found[f"{name}: logical, physical"] = f"{logical} {physical}"
        found[f"{name}: saved, percent"] = f"{1 - physical / logical:.2%}"
    return found


# --- cow -----------------------------------------------------------------------------------------------------------


def _cow(files: Sequence[Steps], printed: Mapping[str, str]) -> dict[str, str]:
    """A copy leaves the source with the sequences that did not copy: before, all of them held it."""
    [steps] = files
    found = {}
    for name in ("two", "four", "full"):
        decodes = [s for s in steps if any(g["id"] == name and not g["prefill"] for g in s["scheduled"])]
        step = decodes[0]
        refs = Counter(block for key, blocks in step["tables"].items() if _owner(key) == name for block in blocks)
        refs.update(f"g{src}" for src, _ in step["copy"])
        found[f"{name}: copies"] = str(len(step["copy"]))
        found[f"{name}: references before, most"] = str(max(refs.values()))
    return found


# --- prefix --------------------------------------------------------------------------------------------------------


def _prefix(files: Sequence[Steps], printed: Mapping[str, str]) -> dict[str, str]:
    [steps] = files
    names = ("cold", "again", "half", "shifted", "salted", "answer", "long", "long-2")
    found = {f"{name}: cached tokens": str(_prompt_steps(steps, name)[0]["computed_before"]) for name in names}
    cached: set[str] = set()
    for name in names:
        table = _table(steps, name)
        full = _num_computed(steps, name) // _BLOCK_SIZE
        cached = (cached - set(table)) | set(table[:full])
    taken = set(_table(steps, "others"))
    return found | {
        "others: cached blocks evicted": str(len(cached & taken)),
        "cached blocks that stayed": str(len(cached - taken)),
    }


def _table(steps: Steps, name: str) -> list[str]:
    """The last one that a request of one choice had."""
    return next(list(step["tables"][f"{name}/0"]) for step in reversed(steps) if f"{name}/0" in step["tables"])


def _num_computed(steps: Steps, name: str) -> int:
    """Tokens whose keys and values it had at its end."""
    return max(g["computed_before"] + g["tokens"] for s in steps for g in s["scheduled"] if g["id"] == name)


RECOMPUTED = {"memory": _memory, "sharing": _sharing, "cow": _cow, "prefix": _prefix}
