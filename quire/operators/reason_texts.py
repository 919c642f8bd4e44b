"""The reasons of `scheduler_svc.core.reasons` in words, by code. Reference of the reasons: docs/explaining.md."""

from collections.abc import Mapping

Numbers = Mapping[str, int | float | str]

NOW: dict[str, str] = {
    "ARRIVED": "just arrived; examined in the next step",
    "NO_WORKER": "no worker can run steps",
    "NEED_BLOCKS": "too few free KV-cache blocks",
    "TOKEN_BUDGET": "the step's token budget is used up",
    "MAX_SEQS": "as many sequences run as are allowed",
    "LORA_SLOTS": "as many adapters are in the batch as are allowed",
    "DELAY": "prompts wait for others, to run together",
    "BATCH_UNDER_WAY": "a static batch admits no request while it runs",
    "STEP_PREEMPTS": "the step preempts, so no request starts in it",
    "DECODE_FIRST": "this step runs decodes only",
    "STEP_GRANTED": "the worker has begun this step by a grant, which is revoked",
    "SWAPPED_FIRST": "swapped requests return before new ones start",
    "OUTRANKED": "requests of higher priority are first",
    "PREFILL_FIRST": "this step runs prompts only",
    "RESULT_PENDING": "their last step is still in flight",
    "MAKES_WAY": "all make way for one that cannot proceed",
    "RESERVED": "blocks are reserved for running requests until they end",
    "THRESHOLD": "prompts may not use more blocks now",
    "SLOT_TYPE": "the slot runs the other kind of step now",
    "LANE_BUSY": "every slot or rank for them is busy",
    "PREFIX_AFFINITY": "they wait for the worker that has their prefix cached",
    "GROUP_BUSY": "another worker has less to do, and starts them",
    "GROUP_TOO_SMALL": "this worker's cache is too small for their longest outputs",
    "WORKER_DRAINS": "every worker is drained",
    "TENANT_SHARE": "it is another tenant's turn",
    "MADE_ROOM": "others were preempted for them; they start in the next step",
    "PREEMPTED": "they were preempted",
    "WORKER_LOST": "their worker was lost; they are recomputed",
    "MOVED": "running, on another worker than before",
    "RUNNING": "running",
    "ENDED": "ended",
    "BEHIND": "behind a request that cannot start",
}
"""Why requests wait now; without numbers."""

PAST: dict[str, str] = {
    "ARRIVED": "it arrived during a step",
    "NO_WORKER": "no worker could run steps: {why}",
    "NEED_BLOCKS": "{need} blocks needed, {free} free, {watermark} kept free",
    "TOKEN_BUDGET": "the step's budget of {budget} tokens was used up",
    "MAX_SEQS": "{running} sequences ran, {limit} are allowed",
    "LORA_SLOTS": "adapter {adapter} would be one more than the {limit} that may run at a time",
    "DELAY": "prompts waited for others, to run together ({delay_s:.3f} s)",
    "BATCH_UNDER_WAY": "a static batch admits no request while it runs",
    "STEP_PREEMPTS": "the step had to preempt others",
    "SWAPPED_FIRST": "{swapped} swapped requests return before new ones start",
    "RESERVED": "with it, running requests are forecast to need {need} of {capacity} blocks",
    "OUTRANKED": "a request of higher priority starts before it returns",
    "PREFILL_FIRST": "the step ran prompts only",
    "DECODE_FIRST": "the step ran decodes only",
    "STEP_GRANTED": "the worker had begun the step by a grant when the revocation reached it",
    "RESULT_PENDING": "its step from before the preemption was in flight",
    "MAKES_WAY": "all made way for a request that could not proceed",
    "PREFIX_AFFINITY": "{known} of its tokens were cached at the worker that it waited for",
    "GROUP_BUSY": "worker {worker} had less to do",
    "GROUP_TOO_SMALL": "the cache of worker {worker} holds {tokens} tokens, too few for its longest output",
    "WORKER_DRAINS": "every worker was drained",
    "MADE_ROOM": "{preempted} others were preempted for it",
    "PREEMPTED recompute": "preempted for {by}: {lost_tokens} tokens to recompute",
    "PREEMPTED swap": "preempted for {by}: {blocks} blocks copied to the host",
    "PREEMPTED": "preempted ({mode})",
    "WORKER_LOST": "its worker was lost; it is recomputed",
    "MOVED": "it went on on worker {worker}, to which its KV was copied from worker {source}",
    "RUNNING": "it ran",
}
"""Why a request waited, with the numbers that decided. "REASON mode" is preferred for an event with that mode."""

_OF_BEHIND = ("head", "head_reason")


def behind(reason: str, numbers: Numbers) -> tuple[str, str, Numbers] | None:
    """For BEHIND: the head of the queue, its reason and the numbers of that. None for other reasons."""
    if reason != "BEHIND" or "head" not in numbers:
        return None
    rest = {name: value for name, value in numbers.items() if name not in _OF_BEHIND}
    return str(numbers["head"]), str(numbers.get("head_reason", "")), rest
