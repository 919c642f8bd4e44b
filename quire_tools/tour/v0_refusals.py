"""Two scenes of the stop `policy-v0`: a prompt that can never fit, and an adapter without a slot."""

from collections.abc import Mapping, Sequence

from quire.client.messages import RequestOptions
from quire_tools.tour import arrivals, pictures, step_facts
from quire_tools.tour.pictures import Step
from quire_tools.tour.scenario import observed, request
from quire_tools.tour.screen import Check, Number, Scene
from quire_tools.tour.stage import TourStack
from svc_common.errors import QuireError

TIMETABLE_WIDTH = 40
_MAX_LORAS = 2
_TOO_LARGE, _TOO_LONG = 232, 300
"""Tokens that need more blocks than exist above the watermark; tokens beyond the model's limit."""
_USERS = {"a": ("one", 14), "b": ("two", 6), "c": ("three", 6), "d": ("", 8)}
"""Adapter and output tokens of each request, in order of arrival."""


def ignored(stack: TourStack) -> Scene:
    """A request that never fits is queued before one that does."""
    requests = [request(name, size, 4) for name, size in {"first": 8, "huge": _TOO_LARGE, "next": 8}.items()]
    seen = observed(stack, arrivals.one_by_one(stack, requests, keep_errors=True))
    [too_long] = stack.together([request("long", _TOO_LONG, 4)], keep_errors=True)
    starts = {name: [number for number, _ in step_facts.shares(seen.steps, name)] for name in seen.names}
    gap = starts["next"][0] - starts["first"][0] if starts["next"] and starts["first"] else 0
    huge, long = _status(seen.outputs["huge"].error), _status(too_long.error)
    return Scene(
        f"`huge`: a prompt of {_TOO_LARGE} tokens",
        pictures.timetable(step_facts.fitting(seen.steps, TIMETABLE_WIDTH), seen.names),
        [
            Number("ignored: steps that `huge` is in", len(starts["huge"])),
            Number("ignored: steps until `next` starts", gap),
        ],
        [
            Check(
                "a prompt that never fits is refused, the next starts at once",
                huge == "OUT_OF_RANGE NEVER_FITS" and not starts["huge"] and gap == 1,
                huge,
            ),
            Check("so is one longer than the model's limit", long == "OUT_OF_RANGE PROMPT_TOO_LONG", long),
        ],
    )


def adapter_slots(stack: TourStack) -> Scene:
    """Requests of three adapters where two may run at a time."""
    numbers = {adapter.name: adapter.adapter_id for adapter in stack.admin.list_adapters()} | {"": 0}
    requests = [
        request(name, 8, length, options=RequestOptions(model=adapter)) for name, (adapter, length) in _USERS.items()
    ]
    seen = observed(stack, arrivals.one_by_one(stack, requests), why=True)
    adapter_ids = {name: numbers[adapter] for name, (adapter, _) in _USERS.items()}
    told = seen.told("c", "LORA_SLOTS")
    starts = {name: next(step_facts.shares(seen.steps, name))[0] for name in _USERS}
    most = max(num_adapters(step, adapter_ids) for step in seen.steps)
    wanted = {"adapter": adapter_ids["c"], "limit": _MAX_LORAS}
    return Scene(
        f"max_loras={_MAX_LORAS}: a, b, c have adapters, d has none",
        pictures.timetable(step_facts.fitting(seen.steps, TIMETABLE_WIDTH), seen.names),
        [
            Number("adapters: most in one step", most),
            Number("adapters: steps from d to c", starts["c"] - starts["d"]),
        ],
        [
            Check(
                "one adapter too many is passed over",
                most == _MAX_LORAS and starts["d"] < starts["c"] and [dict(one) for one in told[:1]] == [wanted],
                f"LORA_SLOTS {' '.join(f'{key}={value}' for key, value in (told[0] if told else {}).items())}",
            ),
            Check("a batch is in order of adapter and id", *_ordered(seen.steps, adapter_ids)),
        ],
    )


def num_adapters(step: Step, adapter_ids: Mapping[str, int]) -> int:
    """Number of distinct adapters in a step."""
    return len({adapter_ids[name] for name in step_facts.ids(step)} - {0})


def _ordered(steps: Sequence[Step], adapter_ids: Mapping[str, int]) -> tuple[bool, str]:
    """True if each step is ordered by adapter and request id; and the longest order as text."""
    orders = [[(adapter_ids[name], name) for name in step_facts.ids(step)] for step in steps]
    longest = max(orders, key=len)
    return all(order == sorted(order) for order in orders), " ".join(f"{name}:{number}" for number, name in longest)


def _status(error: QuireError | None) -> str:
    return "no error" if error is None else f"{error.status} {error.reason}"
