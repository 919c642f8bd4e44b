"""A plan as text: the memory as a bar, the numbers behind it, and advice."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from quire.sizes import size_text
from quire_tools.plan.fits import MemoryPlan

_COLOURS = {
    "weights": "blue", "largest step": "magenta", "attention's workspace": "red", "buffers of swaps": "cyan",
    "CUDA itself": "yellow", "KV cache": "green", "swap space": "cyan", "free": "bright_black",
}  # fmt: skip
_LETTERS = {
    "weights": "W", "largest step": "s", "attention's workspace": "a", "buffers of swaps": "b", "CUDA itself": "c",
    "KV cache": "#", "swap space": "w", "free": ".",
}  # fmt: skip
_OPTIONAL = ("attention's workspace", "buffers of swaps")
_WIDTH = 64


def plan_json(plan: MemoryPlan) -> dict[str, Any]:
    """The plan as JSON values."""
    return {
        "fits": not plan.problems,
        "model": {name: value for name, value in asdict(plan.sizes).items() if name != "states"},
        "asked": asdict(plan.question),
        "parts": [asdict(part) for part in plan.parts],
        "token_bytes": plan.token_bytes,
        "block_bytes": plan.block_bytes,
        "num_gpu_blocks": plan.num_gpu_blocks,
        "num_cpu_blocks": plan.num_cpu_blocks,
        "num_tokens": plan.num_tokens,
        "cache_windows": list(plan.groups.windows),
        "num_state_blocks": plan.num_state_blocks,
        "concurrent_requests": {str(length): number for length, number in plan.concurrent.items()},
        "problems": list(plan.problems),
        "advice": list(plan.advice),
    }


def plan_picture(plan: MemoryPlan) -> RenderableType:
    """The bar, its parts, blocks and requests, and the verdict."""
    return Group(_head(plan), _bar(plan), _parts(plan), _blocks(plan), _requests(plan), *_verdict(plan))


def _head(plan: MemoryPlan) -> Text:
    sizes = plan.sizes
    where = "of the GPU's memory" if plan.question.on_cuda else "of memory"
    return Text(
        f"{sizes.name}: {sizes.num_parameters / 1e6:,.1f} million parameters in {sizes.dtype}, {sizes.num_layers} layers; "
        f"{size_text(plan.question.memory_bytes)} {where}"
    )


def _bar(plan: MemoryPlan) -> Text:
    """A bar of the parts in proportion, at least one cell for each non-empty part."""
    total = max(1, sum(part.num_bytes for part in plan.parts))
    bar = Text("[")
    for part in plan.parts:
        cells = max(1, round(_WIDTH * part.num_bytes / total)) if part.num_bytes else 0
        bar.append(_LETTERS[part.name] * cells, style=_COLOURS[part.name])
    return bar.append("]")


def _parts(plan: MemoryPlan) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(justify="right")
    table.add_column()
    for part in plan.parts:
        if part.name in _OPTIONAL and not part.num_bytes:
            continue
        mark = Text(f"{_LETTERS[part.name]} {part.name}", style=_COLOURS[part.name])
        table.add_row(mark, size_text(part.num_bytes), "estimated; a worker measures it" if part.is_estimate else "")
    return table


def _blocks(plan: MemoryPlan) -> Text:
    sizes = plan.sizes
    head = f"{sizes.head_dim} x {sizes.cache_dtype_bytes} bytes"
    if sizes.cache_scale_bytes:
        head = f"({head} + {sizes.cache_scale_bytes} for a scale)"
    if drafts := plan.question.draft_block_bytes:
        head += f" + {size_text(drafts // plan.question.block_size)} of the drafts"
    return Text(
        f"a token takes {size_text(plan.token_bytes)}: {sizes.num_layers} layers x 2 x {sizes.num_kv_heads} heads x "
        f"{head} ({sizes.cache_dtype}); a block of {plan.question.block_size} "
        f"{size_text(plan.block_bytes)}\n"
        f"{_held(plan)}; {plan.num_cpu_blocks} blocks of swap space"
    )


def _held(plan: MemoryPlan) -> str:
    groups, longest = plan.groups, plan.sizes.max_model_len
    if plan.num_state_blocks:
        states = plan.num_state_blocks
        return (
            f"{plan.num_gpu_blocks} blocks; the states of a request take {states}, {size_text(states * plan.block_bytes)}, "
            f"whatever its length, and its keys and values of {longest} tokens "
            f"{groups.num_blocks(longest, plan.question.block_size)}"
        )
    if len(groups.windows) == 1:
        return f"{plan.num_gpu_blocks} blocks hold {plan.num_tokens} tokens"
    return (
        f"{plan.num_gpu_blocks} blocks of {groups.num_layers} layers each, in {len(groups.windows)} cache groups by the layers' "
        f"windows: a request of {longest} tokens takes {groups.num_blocks(longest, plan.question.block_size)}"
    )


def _requests(plan: MemoryPlan) -> Table:
    table = Table("tokens of a request", "at a time", title_justify="left")
    for column in table.columns:
        column.justify = "right"
    for length, number in plan.concurrent.items():
        limit = " (--max-num-seqs)" if number == plan.question.max_num_seqs else ""
        table.add_row(f"{length:,}", f"{number}{limit}")
    return table


def _verdict(plan: MemoryPlan) -> Iterator[Text]:
    for problem in plan.problems:
        yield Text(f"does not fit: {problem}", style="red")
    if not plan.problems:
        yield Text("it fits", style="green")
    for line in plan.advice:
        yield Text(f"  {line}")
