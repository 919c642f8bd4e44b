"""The stop `offline`: `quire.LLM` in this process and the served stack generate the same tokens."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.console import RenderableType
from rich.text import Text

from quire.client.outputs import RequestOutput
from quire.client.sampling_params import SamplingParams
from quire.offline.llm import LLM
from quire_tools.tour import pictures
from quire_tools.tour.pictures import Step
from quire_tools.tour.screen import Check, Number, declared
from quire_tools.tour.stage import EXACT, Stage, TourRequest

_PROMPTS = (
    "def fibonacci(n):",
    "import os\n",
    "class Stack:\n    def push(",
    "# read a file\nwith open(",
    "for i in range(",
)
_SAMPLES = 2
_LENGTHS = (24, 12, 30, 18, 9)
_PARAMS = [
    SamplingParams(n=_SAMPLES, temperature=0.8, top_p=0.95, seed=number, max_tokens=length, ignore_eos=True)
    for number, length in enumerate(_LENGTHS)
]
_SHOWN = 44


@dataclass(frozen=True, slots=True)
class GenerateRun:
    """Outputs in the order of the prompts, and the steps that made them."""

    outputs: Sequence[RequestOutput]
    steps: Sequence[Step]

    @property
    def samples(self) -> list[list[int]]:
        """Token ids of each sample."""
        return [sample.token_ids for request in self.outputs for sample in request.outputs]

    @property
    def num_sampled(self) -> int:
        """Tokens sampled in all steps."""
        return sum(len(tokens) for step in self.steps for tokens in step["sampled"].values())

    @property
    def timetable(self) -> Text:
        """Its requests by step, named by their prompts' numbers."""
        renamed = {request.request_id: f"p{number}" for number, request in enumerate(self.outputs)}
        steps = [
            dict(step) | {"scheduled": [group | {"id": renamed.get(group["id"], "")} for group in step["scheduled"]]}
            for step in self.steps
        ]
        return pictures.timetable(steps, list(renamed.values()))


def _observe(stage: Stage) -> dict[str, GenerateRun]:
    """Five prompts, two sampled outputs each, once through the services and once in this process."""
    served = _served(stage)
    return {"offline": _offline(stage), "served": served}


def _served(stage: Stage) -> GenerateRun:
    with stage.stack(worker_args=EXACT) as stack:
        pairs = enumerate(zip(_PROMPTS, _PARAMS, strict=True))
        outputs = stack.together([TourRequest(f"p{number}", *pair) for number, pair in pairs])
        return GenerateRun(outputs, stack.steps())


def _offline(stage: Stage) -> GenerateRun:
    with stage.waiting("loading the model into this process"):
        llm = LLM(device="cpu", dtype="float32", log_steps=True)
    with llm:
        outputs = llm.generate(_PROMPTS, _PARAMS, use_tqdm=False)
        stage.keep_steps(llm.steps)
        return GenerateRun(outputs, llm.steps())


def _picture(runs: Mapping[str, GenerateRun]) -> Iterator[RenderableType]:
    offline, served = runs["offline"], runs["served"]
    texts = ((output.prompt or "", output.outputs[0].text) for output in offline.outputs)
    yield pictures.grid(
        (Text(" ".join(prompt.split()), style="bold"), Text(" ".join(text.split())[:_SHOWN], style="green"))
        for prompt, text in texts
    )
    yield pictures.side_by_side(
        ("in this process, one plan at a time", offline.timetable), ("served", served.timetable)
    )
    yield pictures.legend(*pictures.TIMETABLE_LEGEND)


def _numbers(runs: Mapping[str, GenerateRun]) -> list[Number]:
    return [
        number
        for name, run in runs.items()
        for number in (
            Number(f"{name}: steps", len(run.steps)),
            Number(f"{name}: tokens sampled", run.num_sampled),
            Number(f"{name}: tokens computed", sum(step["computed_tokens"] for step in run.steps)),
        )
    ]


def _checks(runs: Mapping[str, GenerateRun]) -> list[Check]:
    offline, served = runs["offline"], runs["served"]
    same = [one == other for one, other in zip(served.samples, offline.samples, strict=True)]
    wanted, first = _SAMPLES * sum(_LENGTHS), offline.steps[0]["scheduled"]
    return [
        Check("token for token the same", all(same), f"{sum(same)} of {len(same)} samples"),
        Check(
            "outputs come in the order of the prompts, with prompt and text",
            [output.prompt for output in offline.outputs] == list(_PROMPTS)
            and all(sample.text for output in offline.outputs for sample in output.outputs),
            f"{len(offline.outputs)} outputs of {_SAMPLES} samples",
        ),
        Check(
            "all prompts are in the first step",
            {group["id"] for group in first} == {output.request_id for output in offline.outputs},
            f"{len(first)} of {len(offline.outputs)}",
        ),
        Check(
            "it steps until all have ended, and no longer",
            len(offline.steps) == max(_LENGTHS) and offline.num_sampled == wanted == served.num_sampled,
            f"{len(offline.steps)} steps, {offline.num_sampled} tokens of {wanted}",
        ),
    ]


STOP = declared(
    "offline",
    "LLM.generate() in process, token for token what the services make.",
    "docs/architecture.md#in-process",
    title="The same engine without services",
    text="LLM.generate() loads the model into this process, steps until all prompts are done and returns them in their order. "
    "Scheduler, model and sampling are those of the services, so equal seeds make equal tokens.",
    observe=_observe,
    picture=_picture,
    checks=_checks,
    numbers=_numbers,
)
