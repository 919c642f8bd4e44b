"""The stop `offline`: `quire.LLM` in this process and the served stack generate the same tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from quire.client.outputs import RequestOutput
from quire.client.sampling_params import SamplingParams
from quire.offline.llm import LLM
from quire_tools.tour import pictures
from quire_tools.tour.pictures import Step
from quire_tools.tour.screen import Check, Number, Screen, Stop
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
_SHOWN = 44


@dataclass(frozen=True, slots=True)
class Run:
    """Outputs in the order of the prompts, and the steps that made them."""

    outputs: Sequence[RequestOutput]
    steps: Sequence[Step]

    @property
    def tokens(self) -> list[list[list[int]]]:
        """Token ids of each sample of each prompt."""
        return [[output.token_ids for output in request.outputs] for request in self.outputs]

    @property
    def names(self) -> list[str]:
        """Ids of the requests in the steps."""
        return [request.request_id for request in self.outputs]


def show(stage: Stage) -> Screen:
    """Five prompts, two sampled outputs each, once through the services and once in this process."""
    served, offline = _served(stage), _offline(stage)
    return Screen(
        "The same engine without services",
        STOP.requirements,
        [
            "LLM.generate() loads the model into this process, steps until all prompts are done and returns them in their order. "
            "Scheduler, model and sampling are those of the services, so equal seeds make equal tokens.",
            _texts(offline),
            pictures.side_by_side(
                ("in this process, one plan at a time", _timetable(offline)), ("served", _timetable(served))
            ),
            pictures.legend(*pictures.TIMETABLE_LEGEND),
        ],
        _checks(served, offline),
        _numbers(served, offline),
    )


def _params() -> list[SamplingParams]:
    return [
        SamplingParams(n=_SAMPLES, temperature=0.8, top_p=0.95, seed=number, max_tokens=length, ignore_eos=True)
        for number, length in enumerate(_LENGTHS)
    ]


def _served(stage: Stage) -> Run:
    with stage.stack(worker_args=EXACT) as stack:
        requests = [
            TourRequest(f"p{number}", prompt, params)
            for number, (prompt, params) in enumerate(zip(_PROMPTS, _params(), strict=True))
        ]
        outputs = stack.together(requests)
        return Run(outputs, stack.steps())


def _offline(stage: Stage) -> Run:
    with stage.waiting("loading the model into this process"):
        llm = LLM(device="cpu", dtype="float32", log_steps=True)
    with llm:
        outputs = llm.generate(_PROMPTS, _params(), use_tqdm=False)
        stage.keep_steps(llm.steps)
        return Run(outputs, llm.steps())


def _texts(run: Run) -> Table:
    table = Table.grid(padding=(0, 2))
    for output in run.outputs:
        text = " ".join(output.outputs[0].text.split())
        table.add_row(Text(" ".join((output.prompt or "").split()), style="bold"), Text(text[:_SHOWN], style="green"))
    return table


def _timetable(run: Run) -> Text:
    renamed = {name: f"p{number}" for number, name in enumerate(run.names)}
    steps = [
        dict(step) | {"scheduled": [group | {"id": renamed.get(group["id"], "")} for group in step["scheduled"]]}
        for step in run.steps
    ]
    return pictures.timetable(steps, list(renamed.values()))


def _computed(run: Run) -> int:
    return sum(step["computed_tokens"] for step in run.steps)


def _sampled(run: Run) -> int:
    return sum(len(tokens) for step in run.steps for tokens in step["sampled"].values())


def _numbers(served: Run, offline: Run) -> list[Number]:
    return [
        number
        for name, run in (("offline", offline), ("served", served))
        for number in (
            Number(f"{name}: steps", len(run.steps), "R5"),
            Number(f"{name}: tokens sampled", _sampled(run), "R7"),
            Number(f"{name}: tokens computed", _computed(run), "R5"),
        )
    ]


def _checks(served: Run, offline: Run) -> list[Check]:
    same = [
        a == b
        for one, other in zip(served.tokens, offline.tokens, strict=True)
        for a, b in zip(one, other, strict=True)
    ]
    wanted = _SAMPLES * sum(_LENGTHS)
    first = offline.steps[0]
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
            {group["id"] for group in first["scheduled"]} == set(offline.names),
            f"{len(first['scheduled'])} of {len(offline.names)}",
        ),
        Check(
            "it steps until nothing is left, and no longer",
            len(offline.steps) == max(_LENGTHS) and _sampled(offline) == wanted == _sampled(served),
            f"{len(offline.steps)} steps, {_sampled(offline)} tokens of {wanted}",
        ),
    ]


STOP = Stop("offline", "LLM.generate() in process, token for token what the services make.", ("R4", "R5", "R7"), show)
