"""A scheduler's answers as tests want them."""

from protos.inference.v1 import admin_pb2 as pb
from quire_tools.top.numbers import Answers, Prefixes, TopNumbers, numbers_of
from quire_tools.top.steps import StepWindow

NOW_NS = 1_700_000_000 * 10**9
MS = 10**6


def step(
    number: int, *, ms: float = 5.0, ended_ms: float = 0.0, prompt: int = 0, decode: int = 4, **others: object
) -> pb.StepReport:
    """One that ended so many milliseconds before NOW_NS, with one token for each of `decode` requests."""
    groups = [pb.ScheduledGroup(id=f"r{i}", tokens=1) for i in range(decode)]
    if prompt:
        groups.append(pb.ScheduledGroup(id="p", tokens=prompt, prefill=True))
    duration_ns = int(ms * MS)
    return pb.StepReport(
        step=number,
        policy="quire",
        scheduled=groups,
        sampled=[pb.SampledTokens(sequence=f"r{i}/0", tokens=[7]) for i in range(decode)],
        duration_ns=duration_ns,
        times=pb.StepTimes(
            finished_ns=NOW_NS - int(ended_ms * MS),
            schedule_ns=MS,
            queued_ns=2 * MS,
            cache_ns=duration_ns // 10,
            prepare_ns=duration_ns // 10,
            model_ns=duration_ns // 2,
            sample_ns=duration_ns // 10,
        ),
        **others,  # type: ignore[arg-type]
    )


def request(
    name: str, queue: str, reason: str, *, age_s: float = 1.0, started: bool = False, **others: object
) -> pb.LiveRequest:
    """One that came so many seconds before NOW_NS."""
    arrived_ns = NOW_NS - int(age_s * 1e9)
    return pb.LiveRequest(
        id=name,
        request_id=name,
        queue=queue,
        reason=reason,
        arrived_ns=arrived_ns,
        started_ns=arrived_ns + 500 * MS if started else None,
        **others,  # type: ignore[arg-type]
    )


def number(name: str, value: int | str) -> pb.Number:
    """One of a reason's numbers."""
    return pb.Number(name=name, text=value) if isinstance(value, str) else pb.Number(name=name, integer=value)


def busy_load() -> pb.GetLoadResponse:
    """20 run, 85 wait, 2 are swapped out; the device is nearly full."""
    return pb.GetLoadResponse(
        queues=pb.Queues(waiting=85, running=20, swapped=2),
        num_waiting=85,
        max_waiting=4096,
        num_waiting_tokens=21_000,
        gpu=pb.BlockPool(total=300, free=12, cached=9),
        cpu=pb.BlockPool(total=1024, free=1000, cached=0),
        output_tokens_per_s=1712.4,
        serving=True,
        tenants=[pb.TenantLoad(tenant="acme", num_waiting=80, num_running=10), pb.TenantLoad(num_waiting=5)],
    )


def busy_requests() -> pb.ListRequestsResponse:
    """The same requests, some of them listed."""
    needs = [number("need", 14), number("free", 3), number("watermark", 3)]
    behind = [number("head", "01a201fb-a15a-7abd-8892-000000000000"), number("head_reason", "NEED_BLOCKS"), *needs]
    listed = [
        *(
            request(f"run-{i}", "running", "RUNNING", age_s=9, started=True, prompt_tokens=100, cached_prompt_tokens=25)
            for i in range(20)
        ),
        request(
            "swap-0",
            "swapped",
            "NEED_BLOCKS",
            age_s=8,
            started=True,
            numbers=needs,
            num_preemptions=2,
            prompt_tokens=100,
        ),
        request("01a201fb-a15a-7abd-8892-000000000000", "waiting", "NEED_BLOCKS", age_s=7, numbers=needs),
        *(
            request(f"wait-{i}", "waiting", "BEHIND", age_s=6 - i / 100, numbers=behind, tenant="acme")
            for i in range(60)
        ),
    ]
    reasons = [
        ("running", "RUNNING", 20),
        ("swapped", "NEED_BLOCKS", 2),
        ("waiting", "BEHIND", 84),
        ("waiting", "NEED_BLOCKS", 1),
    ]
    return pb.ListRequestsResponse(
        requests=listed,
        reasons=[pb.ReasonCount(queue=q, reason=r, num_requests=n) for q, r, n in reasons],
        step=400,
        num_left_out=25,
    )


def busy_workers() -> list[pb.Worker]:
    """One that runs steps and one that is away."""
    return [
        pb.Worker(address="127.0.0.1:40001", ready=True, model="tiny", epoch=3, num_gpu_blocks=300),
        pb.Worker(address="127.0.0.1:40002", lane=1, reason="it cannot be reached"),
    ]


def busy() -> TopNumbers:
    """All of it, with 100 steps."""
    window = StepWindow()
    window.take(
        [
            step(
                i,
                ms=5 + i % 7,
                ended_ms=(400 - i) * 10,
                preempted=[pb.Preempted(id="x", mode="swap")] if i == 350 else (),
            )
            for i in range(301, 401)
        ],
        since=301,
    )
    answers = Answers(NOW_NS, busy_load(), busy_requests(), busy_workers())
    return numbers_of(answers, window.figures(NOW_NS), Prefixes(21, 2_100, 500), window.policy)
