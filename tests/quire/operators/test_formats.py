"""`quire steps` and `quire blocks`: the documented JSON, key by key, and text that says the same."""

from protos.inference.v1 import admin_pb2 as pb
from quire.operators.admin import blocks_json, blocks_text, step_json, step_line
from svc_common.step_text import step_text

REPORT = pb.StepReport(
    step=7,
    epoch=2,
    lane=0,
    policy="vllm-v1",
    scheduled=[
        pb.ScheduledGroup(id="a", seqs=["a/0"], tokens=1, computed_before=30, prefill=False),
        pb.ScheduledGroup(id="b", seqs=["b/0"], tokens=12, computed_before=16, prefill=True),
    ],
    swap_in=[pb.BlockPair(src=1, dst=2)],
    swap_out=[pb.BlockPair(src=3, dst=4), pb.BlockPair(src=5, dst=6)],
    copy=[pb.BlockPair(src=7, dst=8)],
    preempted=[pb.Preempted(id="c", mode="recompute")],
    queues=pb.Queues(waiting=1, running=2, swapped=3),
    free=pb.FreeBlocks(gpu=9, cpu=10),
    sampled=[pb.SampledTokens(sequence="a/0", tokens=[42])],
    computed_tokens=13,
    tables=[pb.BlockTable(sequence="a/0", blocks=["g3", "c0"])],
    duration_ns=2_500_000,
    times=pb.StepTimes(
        planned_ns=100, schedule_ns=7, finished_ns=2_600_000, started_ns=300, model_ns=2_000_000, sample_ns=500_000
    ),
)

EXPECTED = {
    "step": 7,
    "epoch": 2,
    "lane": 0,
    "policy": "vllm-v1",
    "scheduled": [
        {"id": "a", "seqs": ["a/0"], "tokens": 1, "computed_before": 30, "prefill": False},
        {"id": "b", "seqs": ["b/0"], "tokens": 12, "computed_before": 16, "prefill": True},
    ],
    "swap_in": [[1, 2]],
    "swap_out": [[3, 4], [5, 6]],
    "copy": [[7, 8]],
    "preempted": [["c", "recompute"]],
    "queues": {"waiting": 1, "running": 2, "swapped": 3},
    "free": [9, 10],
    "sampled": {"a/0": [42]},
    "computed_tokens": 13,
    "times": {
        "planned_ns": 100,
        "schedule_ns": 7,
        "finished_ns": 2_600_000,
        "started_ns": 300,
        "cache_ns": 0,
        "prepare_ns": 0,
        "model_ns": 2_000_000,
        "sample_ns": 500_000,
        "queued_ns": 0,
    },
}


def test_step_as_json() -> None:
    """The keys of the issue and `times`; `tables` on request alone; `error` where the step failed, grants where there are some."""
    assert step_json(REPORT, tables=False) == EXPECTED
    assert step_json(REPORT, tables=True) == EXPECTED | {"tables": {"a/0": ["g3", "c0"]}}
    failed = pb.StepReport(step=1, error="device lost")
    assert step_json(failed, tables=False)["error"] == "device lost"
    granted = step_json(pb.StepReport(granted_steps=3, is_repeat=True, revoked="ROW_ENDED"), tables=False)
    assert (granted["granted_steps"], granted["is_repeat"], granted["revoked"]) == (3, True, "ROW_ENDED")


def test_grants_as_text() -> None:
    """What a step grants, that it was repeated, and why the rest of the grant before was revoked."""
    assert "grant" not in step_text(REPORT)
    first = step_text(pb.StepReport(granted_steps=7, revoked="ROW_ENDED")).splitlines()[0]
    assert first.endswith("  grants 7 more  rest of a grant revoked: ROW_ENDED")
    assert step_text(pb.StepReport(is_repeat=True)).splitlines()[0].endswith("  repeated by grant")


def test_empty_step_has_every_key() -> None:
    """A program finds each key also where there is nothing to say."""
    assert set(step_json(pb.StepReport(), tables=False)) == set(EXPECTED)


def test_blocks_as_json() -> None:
    """`block_size, gpu {total, free, cached}, cpu {…}, tables, refs`; blocks in order of their numbers."""
    response = pb.GetBlocksResponse(
        block_size=16,
        gpu=pb.BlockPool(total=31, free=20, cached=4),
        cpu=pb.BlockPool(total=8, free=8),
        tables=[pb.BlockTable(sequence="r/0", blocks=["g10", "g3"]), pb.BlockTable(sequence="q/0", blocks=["g3"])],
        refs={"g10": 1, "g3": 2},
    )
    values = blocks_json(response)
    assert values == {
        "block_size": 16,
        "gpu": {"total": 31, "free": 20, "cached": 4},
        "cpu": {"total": 8, "free": 8, "cached": 0},
        "tables": {"r/0": ["g10", "g3"], "q/0": ["g3"]},
        "refs": {"g3": 2, "g10": 1},
    }
    assert list(values["refs"]) == ["g3", "g10"]
    assert "r/0: g10 g3" in blocks_text(response)
    assert "shared: g3 by 2" in blocks_text(response)
    response.num_state_blocks = 1
    assert blocks_json(response) == {**values, "num_state_blocks": 1}
    assert "r/0: states g10, tokens g3" in blocks_text(response)


def test_steps_as_text() -> None:
    """The readable forms carry the numbers that a person looks for."""
    assert step_line(REPORT).startswith("step 7  13 tokens of 2 requests (1 prefill)")
    text = step_text(REPORT)
    for part in ("2.50 ms", "decode  a  tokens 30..31 (1) -> [42]", "prefill b  tokens 16..28 (12)"):
        assert part in text
    for part in ("preempted c by recompute", "swap out: 3 -> 4, 5 -> 6", "table a/0: g3 c0", "9 gpu, 10 cpu"):
        assert part in text
