"""Random JSON schemas through the services: undisturbed, preempted, with drafts; every output is what its schema allows.

A sample here, the whole (200 schemas, 240 outputs) in `make test-long`; sizes are printed.
"""

import json
import urllib.request
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from quire.local_stack.stack import LocalStack
from tests.e2e import schema_requests
from tests.e2e.schema_requests import Ask, Outputs
from tests.support.stack.commands import blocks, last_step, steps_since
from tests.support.stack.sizes import SMALL_STEP

Record = Callable[[str, object], None]
FEW_BLOCKS = ("restraint=null",)


@dataclass(frozen=True, slots=True)
class Setting:
    """What the requests have to live with. `modes`: of preemptions that must happen; `num_blocks`: None = plenty."""

    name: str
    sets: tuple[str, ...] = ()
    modes: frozenset[str] = field(default_factory=frozenset)
    num_blocks: int | None = None
    has_drafts: bool = False

    def stack(self) -> LocalStack:
        """Its three processes."""
        few = () if self.num_blocks is None else ("--num-gpu-blocks-override", str(self.num_blocks))
        return LocalStack(
            policy_set=self.sets,
            max_num_batched_tokens=SMALL_STEP,
            worker_args=("--dtype", "float32", "--max-model-len", "256", "--swap-space", "16MiB", *few),
            scheduler_args=("--max-num-seqs", "16"),
        )


UNDISTURBED = Setting("undisturbed")
DISTURBED = [
    Setting("drafts", ("num_spec_tokens=4",), has_drafts=True),
    Setting("recompute", (*FEW_BLOCKS, "preemption_mode=recompute"), frozenset({"recompute"}), 22),
    Setting("swap", (*FEW_BLOCKS, "preemption_mode=swap"), frozenset({"swap"}), 22),
    Setting("drafts and recompute", (*FEW_BLOCKS, "preemption_mode=recompute", "num_spec_tokens=4"),
            frozenset({"recompute"}), 22, has_drafts=True),
]  # fmt: skip
TIGHT = Setting("drafts and swap", modes=frozenset({"swap"}), has_drafts=True)
"""That of the fixture `tight`."""
_ATTEMPTS = 5


def run(setting: Setting, wanted: list[Ask]) -> tuple[Outputs, str]:
    """Outputs on a stack of the setting's own."""
    with setting.stack() as stack:
        return run_on(stack, setting, wanted)


def run_on(stack: LocalStack, setting: Setting, wanted: list[Ask]) -> tuple[Outputs, str]:
    """Outputs, and what the step log shows: that the setting was as disturbing as it is meant to be.

    On a busy machine requests may come so far apart that all find room: they are asked again then, for the same outputs.
    """
    first = last_step(stack.admin_address)
    outputs, left, log = schema_requests.run(stack.grpc_address, wanted), Counter[str](), list[dict[str, Any]]()
    for _ in range(_ATTEMPTS):
        log = steps_since(stack.admin_address, first)
        pool = blocks(stack.admin_address)["gpu"]
        assert pool["free"] == pool["total"]
        left = Counter(mode for step in log for _, mode in step["preempted"])
        if left.keys() >= setting.modes:
            break
        assert schema_requests.run(stack.grpc_address, wanted) == outputs
    counts = schema_requests.check(wanted, outputs)
    num_accepted = sum(len(drawn) - 1 for step in log for drawn in step["sampled"].values() if drawn)
    assert left.keys() >= setting.modes, f"{setting.name}: the pool was to force it"
    assert (num_accepted > 0) == setting.has_drafts, setting.name
    return outputs, (
        f"{setting.name}: {dict(counts)}, {len(log)} steps, preempted {dict(left)}, {num_accepted} drafts accepted"
    )


def over_http(stack: LocalStack, ask: Ask) -> dict[str, Any]:
    """The first choice as OpenAI's API gives it."""
    params = ask.params
    body = {
        "model": "tiny",
        "prompt": ask.prompt,
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "seed": params.seed,
        "response_format": {"type": "json_schema", "json_schema": {"name": "it", "schema": ask.schema}},
    }
    request = urllib.request.Request(
        f"{stack.http_url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        choice: dict[str, Any] = json.load(response)["choices"][0]
        return choice


def test_outputs_fit_their_schemas(stack: LocalStack, tight: LocalStack, record_property: Record) -> None:
    """R25, R150: 16 schemas in few blocks with drafts give what they give undisturbed; OpenAI's `response_format` gives it too."""
    wanted = schema_requests.asks(16)
    expected = schema_requests.run(stack.grpc_address, wanted)
    schema_requests.check(wanted, expected)
    for ask in wanted[1:4]:
        got, [choice] = over_http(stack, ask), expected[ask.number]
        assert (got["text"], got["finish_reason"]) == (choice.text, choice.finish_reason)
    outputs, told = run_on(tight, TIGHT, wanted)
    assert schema_requests.tokens(outputs) == schema_requests.tokens(expected)
    record_property("size", f"16 schemas through the services, {told}")


@pytest.mark.long
@pytest.mark.timeout(600)
def test_outputs_fit_two_hundred_schemas(record_property: Record) -> None:
    """R25, R72, R75, R150: 200 schemas; whole outputs validate, at least 190 are whole, cut ones are beginnings that the grammar
    takes; the same tokens whether undisturbed, preempted by recompute or swap, with drafts, or both."""
    wanted = schema_requests.asks(200)
    expected, told = run(UNDISTURBED, wanted)
    num_whole = sum(choices[0].finish_reason == "stop" for choices in expected.values())
    assert 190 <= num_whole < len(wanted)
    record_property("size", f"200 schemas, {num_whole} of them whole, {told}")
    for setting in DISTURBED:
        outputs, told = run(setting, wanted)
        assert schema_requests.tokens(outputs) == schema_requests.tokens(expected), setting.name
        record_property("size", f"200 schemas, {told}")
