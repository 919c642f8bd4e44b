"""Two scenes of the stop `policy-v0`: a prompt that can never fit, and an adapter without a slot."""

from collections.abc import Mapping, Sequence
from typing import Any

from quire.client.messages import RequestOptions
from quire.client.sampling_params import SamplingParams
from quire_tools.tour import arrivals, pictures, step_facts
from quire_tools.tour.pictures import Step
from quire_tools.tour.scene import Scene
from quire_tools.tour.screen import Check, Number
from quire_tools.tour.stage import TourRequest, TourStack
from svc_common.errors import QuireError

MAX_LORAS = 2
_TOO_LARGE, _TOO_LONG = 232, 300
"""Tokens that need more blocks than exist above the watermark; tokens beyond the model's limit."""
_USERS = {"a": ("one", 14), "b": ("two", 6), "c": ("three", 6), "d": ("", 8)}
"""Adapter and output tokens of each request, in order of arrival."""
_WIDTH = 40


def ignored(stack: TourStack) -> Scene:
    """A request that never fits is queued before one that does."""
    names = ["first", "huge", "next"]
    sizes = {"first": 8, "huge": _TOO_LARGE, "next": 8}
    requests = [TourRequest(name, _prompt(name, sizes[name]), _params(4)) for name in names]
    outputs = dict(zip(names, arrivals.one_by_one(stack, requests, keep_errors=True), strict=True))
    too_long = stack.together([TourRequest("long", _prompt("long", _TOO_LONG), _params(4))], keep_errors=True)[0]
    steps = step_facts.about(stack.steps(), names)
    starts = {name: [number for number, _ in step_facts.shares(steps, name)][:1] for name in names}
    gap = starts["next"][0] - starts["first"][0] if starts["next"] and starts["first"] else 0
    return Scene(
        f"`huge`: a prompt of {_TOO_LARGE} tokens",
        pictures.timetable(step_facts.fitting(steps, _WIDTH), names),
        [
            Number("ignored: steps that `huge` is in", len(list(step_facts.shares(steps, "huge"))), "R51"),
            Number("ignored: steps until `next` starts", gap, "R50"),
        ],
        [
            Check(
                "what never fits is refused, the next starts at once",
                _status(outputs["huge"].error) == "OUT_OF_RANGE NEVER_FITS" and not starts["huge"] and gap == 1,
                _status(outputs["huge"].error),
            ),
            Check(
                "so is what is longer than the model takes",
                _status(too_long.error) == "OUT_OF_RANGE PROMPT_TOO_LONG",
                _status(too_long.error),
            ),
        ],
    )


def adapter_slots(stack: TourStack) -> Scene:
    """Requests of three adapters where two may run at a time."""
    numbers = {adapter.name: adapter.adapter_id for adapter in stack.admin.list_adapters()} | {"": 0}
    requests = [
        TourRequest(name, _prompt(name, 8), _params(length), RequestOptions(model=adapter))
        for name, (adapter, length) in _USERS.items()
    ]
    arrivals.one_by_one(stack, requests)
    adapter_ids = {name: numbers[adapter] for name, (adapter, _) in _USERS.items()}
    steps = step_facts.about(stack.steps(), _USERS)
    told = [e["numbers"] for e in stack.why("c")["episodes"] if e["reason"] == "LORA_SLOTS"]
    starts = {name: next(step_facts.shares(steps, name))[0] for name in _USERS}
    most = max(num_adapters(step, adapter_ids) for step in steps)
    return Scene(
        f"max_loras={MAX_LORAS}: a, b, c have adapters, d has none",
        pictures.timetable(step_facts.fitting(steps, _WIDTH), list(_USERS)),
        [
            Number("adapters: most in one step", most, "R53"),
            Number("adapters: steps from d to c", starts["c"] - starts["d"], "R53"),
        ],
        [
            Check(
                "one adapter too many is passed over",
                most == MAX_LORAS and starts["d"] < starts["c"] and _tells(told, adapter_ids["c"]),
                f"LORA_SLOTS {' '.join(f'{key}={value}' for key, value in (told[0] if told else {}).items())}",
            ),
            Check("a batch is in order of adapter and id", *_ordered(steps, adapter_ids)),
        ],
    )


def num_adapters(step: Step, adapter_ids: Mapping[str, int]) -> int:
    """Number of distinct adapters in a step."""
    return len({adapter_ids[name] for name in step_facts.ids(step)} - {0})


def _tells(told: Sequence[Mapping[str, Any]], adapter_id: int) -> bool:
    return bool(told) and dict(told[0]) == {"adapter": adapter_id, "limit": MAX_LORAS}


def _ordered(steps: Sequence[Step], adapter_ids: Mapping[str, int]) -> tuple[bool, str]:
    """True if each step is ordered by adapter and request id; and the longest order as text."""
    orders = [[(adapter_ids[name], name) for name in step_facts.ids(step)] for step in steps]
    longest = max(orders, key=len)
    return all(order == sorted(order) for order in orders), " ".join(f"{name}:{number}" for number, name in longest)


def _status(error: QuireError | None) -> str:
    return "no error" if error is None else f"{error.status} {error.reason}"


def _prompt(name: str, num_tokens: int) -> list[int]:
    return [100 + (37 * ord(name[0]) + 11 * place) % 3_000 for place in range(num_tokens)]


def _params(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
