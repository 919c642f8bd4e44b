"""Scenarios: requests for a stack with given options, and what was read of it after they ended."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

from quire.client.messages import RequestOptions
from quire.client.outputs import RequestOutput
from quire.client.sampling_params import SamplingParams
from quire_tools.tour import step_facts
from quire_tools.tour.pictures import Step
from quire_tools.tour.stage import Stage, TourRequest, TourStack

Arrive = Callable[[TourStack, Sequence[TourRequest]], Sequence[RequestOutput]]
"""How requests arrive, such as `TourStack.together` or `arrivals.one_by_one`; returns their outputs in order."""


def request(name: str, num_prompt: int, num_output: int, *, like: str = "", **values: Any) -> TourRequest:
    """A request of given prompt and output tokens. The prompts of two names differ in every token.

    `like`: take the prompt of this name; `values`: sampling parameters besides greedy ones, or `options`.
    """
    first = 100 + crc32((like or name).encode()) % 2_900
    options = values.pop("options", RequestOptions())
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": num_output, "ignore_eos": True} | values)
    return TourRequest(name, [first + place for place in range(num_prompt)], params, options)


def tiny_worker(max_model_len: int, num_blocks: int, *more: str) -> tuple[str, ...]:
    """Worker options for a cache of `num_blocks` blocks; most cache rules never allocate one of them, the null block."""
    limits = ("--max-model-len", str(max_model_len), "--num-gpu-blocks-override", str(num_blocks))
    return ("--dtype", "float32", *limits, *more)


@dataclass(frozen=True, slots=True)
class Observation:
    """What a stack did with a scenario's requests.

    `steps`: those in which one of them runs or is preempted; `outputs`, `episodes` (of `quire why`, if read):
    by request id; `pool`: the device blocks when all have ended.
    """

    steps: Sequence[Step]
    outputs: Mapping[str, RequestOutput] = field(default_factory=dict)
    episodes: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    pool: Mapping[str, int] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """Request ids, in order of arrival."""
        return list(self.outputs)

    @property
    def tokens(self) -> list[list[list[int]]]:
        """Token ids of each sample of each request."""
        return [[list(sample.token_ids) for sample in output.outputs] for output in self.outputs.values()]

    def told(self, name: str, reason: str) -> list[Mapping[str, Any]]:
        """The numbers of each of a request's episodes with this reason."""
        return [episode["numbers"] for episode in self.episodes[name] if episode["reason"] == reason]

    def lanes_of(self, name: str) -> list[int]:
        """Lanes (cache slots or dp ranks) that a request ran in."""
        return sorted({step["lane"] for step in self.steps if name in step_facts.ids(step)})

    def of_lane(self, lane: int) -> list[Step]:
        """Steps of one lane."""
        return [step for step in self.steps if step["lane"] == lane]


def observed(
    stack: TourStack,
    outputs: Iterable[RequestOutput],
    *,
    names: Iterable[str] = (),
    tables: bool = False,
    why: bool = False,
) -> Observation:
    """Read a stack on which requests have ended: those of `outputs`, or `names`. `why`: also read their timelines."""
    by_name = {output.request_id: output for output in outputs}
    known = [*by_name, *names]
    steps = step_facts.about(stack.steps(tables=tables), known)
    episodes = {name: stack.why(name)["episodes"] for name in known} if why else {}
    return Observation(steps, by_name, episodes, stack.blocks()["gpu"])


@dataclass(frozen=True, slots=True)
class Scenario:
    """Requests, how they arrive, and the options (fields of StackOptions) of the stack that runs them.

    `tables`: read steps with block tables; `why`: read the requests' timelines.
    """

    requests: Sequence[TourRequest]
    arrive: Arrive = TourStack.together
    options: Mapping[str, Any] = field(default_factory=dict)
    tables: bool = False
    why: bool = False

    def observe(self, stage: Stage) -> Observation:
        """Run the requests on a stack and read it."""
        with stage.stack(tables=self.tables, **self.options) as stack:
            outputs = self.arrive(stack, self.requests)
            return observed(stack, outputs, tables=self.tables, why=self.why)
