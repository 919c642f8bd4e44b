"""Runs requests through the scheduler core and through contiguous memory, recording what each holds per step.

Both serve the same jobs first come, first served: the prompt in one step, then one token of each sample per
step. The requests are defined in benchmarks.memory.workloads.
"""

import math
import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from block_manager.contiguous import (
    BuddyAllocator,
    ContiguousDemand,
    ContiguousMemory,
    ContiguousRequest,
    ContiguousServer,
)
from block_manager.memory_report import PagedMemory
from scheduler_svc.core.composition import presets
from scheduler_svc.core.limits import CoreLimits
from scheduler_svc.core.plan import ScheduledSequence, StepPlan, StepResult
from scheduler_svc.core.request import Request
from scheduler_svc.core.request_rules import BeamRules, StopRules
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.observe import memory_view

# Maximum n of a request: as many sequences as run at a time.
MAX_N = 256
_VOCABULARY = 50_000
# Logprobs of the synthetic model: at this share of positions a text can continue with several words, with
# normal logits of this spread. Elsewhere the next word is certain and no other has a chance.
_OPEN_SHARE, _NUM_WAYS, _SPREAD, _NO_CHANCE = 0.08, 64, 6.0, -50.0


class Kind(StrEnum):
    """Kind of a request's samples."""

    SAMPLING = "sampling"
    BEAM = "beam"


@dataclass(frozen=True, slots=True)
class Job:
    """One request.

    `prompt`: tokens. `outputs`: decode steps (its last token, one more, takes no slot). `arrival_step`: the
    step it arrives before.
    """

    prompt: int
    outputs: int
    arrival_step: int = 0

    @property
    def final_length(self) -> int:
        """Tokens with KV at the end."""
        return self.prompt + self.outputs


@dataclass(frozen=True, slots=True)
class Setting:
    """`n` samples or beams per request, in `num_blocks` blocks, for a model of at most `max_model_len` tokens."""

    kind: Kind
    n: int
    block_size: int
    num_blocks: int
    max_model_len: int
    seed: int = 0

    @property
    def num_slots(self) -> int:
        """Tokens that the memory can hold."""
        return self.num_blocks * self.block_size


@dataclass(frozen=True, slots=True)
class Moment:
    """Memory right after `schedule()` of one step. `is_decode`: the step computes no prompt."""

    memory: PagedMemory
    num_running: int
    is_decode: bool


class Model:
    """A language model as the scheduler sees it: tokens, or candidates of a beam with random logprobs. Seeded."""

    def __init__(self, setting: Setting) -> None:
        self._kind, self._n = setting.kind, setting.n
        self._random = random.Random(setting.seed)

    def answer(self, plan: StepPlan, core: Scheduler) -> StepResult:
        """The result of a plan."""
        result = StepResult(plan.step)
        for entry in plan.scheduled:
            if entry.samples:
                self._continue(entry, core, result)
        return result

    def _continue(self, entry: ScheduledSequence, core: Scheduler, result: StepResult) -> None:
        if self._kind is Kind.BEAM and self._n > 1:
            result.candidates[entry.name] = self._candidates()
        elif self._n > 1 and self._is_first(entry, core):
            result.children[entry.name] = [self._token() for _ in range(self._n)]
        else:
            result.tokens[entry.name] = [self._token()]

    @staticmethod
    def _is_first(entry: ScheduledSequence, core: Scheduler) -> bool:
        request = core.request(entry.request_id)
        return request is not None and request.sequences[0].num_output_tokens == 0

    def _token(self) -> int:
        return self._random.randrange(_VOCABULARY)

    def _candidates(self) -> list[tuple[int, float]]:
        """2 x n different tokens with their logprobs, best first."""
        tokens = self._random.sample(range(_VOCABULARY), 2 * self._n)
        if self._random.random() >= _OPEN_SHARE:
            return [(token, _NO_CHANCE if i else 0.0) for i, token in enumerate(tokens)]
        logits = sorted((self._random.gauss(0.0, _SPREAD) for _ in range(_NUM_WAYS)), reverse=True)
        total = math.log(sum(map(math.exp, logits)))
        logprobs = [logit - total for logit in logits] + [_NO_CHANCE] * len(tokens)
        return list(zip(tokens, logprobs, strict=False))


def serve_paged(jobs: list[Job], setting: Setting) -> Iterator[Moment]:
    """Serve the jobs with preset vllm-v0 until all are done."""
    core, model = _core(setting), Model(setting)
    coming, step = deque(enumerate(jobs)), 0
    while coming or core.has_unfinished:
        while coming and coming[0][1].arrival_step <= step:
            index, job = coming.popleft()
            core.add(_request(f"r{index}", job, setting))
        [plan] = core.schedule(float(step))
        if plan.ended:
            raise RuntimeError(f"{plan.ended[0].request_id} does not fit a memory of {setting.num_slots} slots")
        yield Moment(memory_view.paged(core.states), len(core.state.running), plan.num_prefill_groups == 0)
        core.update(model.answer(plan, core))
        step += 1


def serve_contiguous(jobs: list[Job], setting: Setting) -> Iterator[tuple[ContiguousMemory, int]]:
    """Serve the jobs in regions of `max_model_len` slots, since their final length is not known.

    Memory, running requests.
    """
    if BuddyAllocator.region_size(setting.max_model_len) * setting.n > setting.num_slots:
        raise ValueError(f"{setting.n} regions for {setting.max_model_len} tokens do not fit {setting.num_slots} slots")
    demand, server = ContiguousDemand(setting.n, setting.max_model_len), ContiguousServer(setting.num_slots)
    coming, running, step = deque(enumerate(jobs)), dict[int, tuple[Job, int]](), 0
    while coming or running:
        while coming and coming[0][1].arrival_step <= step and server.enter(str(coming[0][0]), demand):
            index, job = coming.popleft()
            running[index] = (job, job.prompt)
        tenants = [ContiguousRequest(demand, (held,) * setting.n, job.final_length) for job, held in running.values()]
        waits = bool(coming) and coming[0][1].arrival_step <= step
        yield server.report(tenants, [demand] if waits else []), len(running)
        running = dict(_grown(running, server))
        step += 1


def _grown(running: dict[int, tuple[Job, int]], server: ContiguousServer) -> Iterator[tuple[int, tuple[Job, int]]]:
    """Each request after one more token; completed ones free their regions."""
    for index, (job, held) in running.items():
        if held < job.final_length:
            yield index, (job, held + 1)
        else:
            server.leave(str(index))


def _core(setting: Setting) -> Scheduler:
    limits = CoreLimits(
        block_size=setting.block_size,
        num_gpu_blocks=setting.num_blocks,
        num_cpu_blocks=setting.num_blocks,
        max_model_len=setting.max_model_len,
        max_num_seqs=MAX_N,
        max_num_batched_tokens=max(setting.max_model_len, MAX_N),
        prefix_caching=False,
        chunked_prefill=False,
    )
    return presets.build("vllm-v0", limits)


def _request(request_id: str, job: Job, setting: Setting) -> Request:
    stop = StopRules(max_tokens=job.outputs + 1, ignore_eos=True)
    beam = BeamRules() if setting.kind is Kind.BEAM and setting.n > 1 else None
    return Request(request_id, [0] * job.prompt, stop, 0.0, n=setting.n, beam=beam)
