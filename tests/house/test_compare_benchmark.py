"""The comparison with peers (issue 8): workloads, limits, arithmetic, wires, command lines, and a real run of Quire alone."""

import asyncio
import io
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console

from benchmarks.compare import __main__ as command_line
from benchmarks.compare import (
    checkpoints,
    figures,
    goals,
    install,
    limits,
    shapes,
    sse,
    table,
    tokens,
    wires,
    workloads,
)
from benchmarks.compare.engines import registry
from benchmarks.compare.engines.base import Form, Host, Memory, Run, complete
from benchmarks.compare.offline import child
from benchmarks.compare.rounds import Rounds, references
from benchmarks.compare.workloads import DEFAULTS, Lengths, Workload, drawn, fixed
from quire.bench.measure import Record
from quire.bench.workloads import Length, Planned
from quire.processes import child_environment

VOCAB = 1_000
BIG = shapes.SHAPES["bench-135m"]
# The rates at which the published limits of W1, W3 and W4 were computed.
ANCHOR = limits.Rates(read_one=18e9, read_all=33e9, gemm_bf16=430e9, gemm_fp32=200e9)


def workload(name: str, lengths: Lengths, round_: int = 0, seed: int = 0) -> Workload:
    """Drawn with the vocabulary of these tests."""
    return drawn(name, lengths, seed=seed, round_=round_, vocab_size=VOCAB)


# --- what is asked ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "num_requests", "prompt", "output"),
    [("W1", 64, {64}, {128}), ("W3", 64, {544}, {32}), ("W4", 1, {128}, {256}), ("P", 16, {512}, {1})],
)
def test_workloads_have_their_lengths(name: str, num_requests: int, prompt: set[int], output: set[int]) -> None:
    """As the goals say them, all at once, special tokens left out."""
    requests = workload(name, DEFAULTS[name]).requests
    assert len(requests) == num_requests and {request.at_s for request in requests} == {0.0}
    assert {len(request.token_ids) for request in requests} == prompt
    assert {request.max_tokens for request in requests} == output
    assert all(shapes.NUM_SPECIAL <= token < VOCAB for request in requests for token in request.token_ids)


def test_mixed_lengths_stay_within_their_bounds() -> None:
    """W2's are spread over them, and W5 has arrivals of the rate besides."""
    requests = workload("W2", DEFAULTS["W2"]).requests
    prompts, outputs = [len(r.token_ids) for r in requests], [r.max_tokens for r in requests]
    assert 32 <= min(prompts) < 100 and 200 < max(prompts) <= 512
    assert 16 <= min(outputs) < 40 and 100 < max(outputs) <= 256
    arrivals = [r.at_s for r in workload("W5", workloads.at_rate(DEFAULTS["W5"], 4.0)).requests]
    assert arrivals[0] == 0 and arrivals == sorted(arrivals) and 8 < arrivals[-1] < 32


def test_a_seed_decides_everything_and_a_round_the_tokens() -> None:
    """Rounds have equal lengths and arrivals but no prompt in common; a rate changes nothing else."""
    lengths = workloads.at_rate(DEFAULTS["W5"], 2.0)
    first, again, next_round, other = (workload("W5", lengths, r, s) for r, s in ((0, 0), (0, 0), (1, 0), (0, 1)))
    assert first == again
    assert [r.max_tokens for r in first.requests] == [r.max_tokens for r in next_round.requests]
    assert [r.at_s for r in first.requests] == [r.at_s for r in next_round.requests]
    assert not {r.token_ids for r in first.requests} & {r.token_ids for r in next_round.requests}
    assert [r.max_tokens for r in other.requests] != [r.max_tokens for r in first.requests]
    assert [r.token_ids for r in workload("W5", DEFAULTS["W5"]).requests] == [r.token_ids for r in first.requests]


def test_the_shared_prefix_is_shared() -> None:
    """512 tokens in all prompts of W3, none in others, not even in one prompt alone."""
    assert limits.shared_prefix(workload("W3", DEFAULTS["W3"])) == 512
    assert limits.shared_prefix(workload("W1", DEFAULTS["W1"])) == 0
    assert limits.shared_prefix(workload("W4", DEFAULTS["W4"])) == 0


def test_changes_from_the_command_line() -> None:
    """Lengths, numbers and the rate; and what is no change is refused."""
    found = command_line._lengths(
        ["W2", "W4", "W5"], 8, ["W2.prompt=lognormal:9:0.5:4:16", "W5.rate=2.5", "W4.output=7"]
    )
    assert list(found) == ["W2", "W4", "W5"]
    assert found["W2"].num_requests == 8 and found["W2"].prompt == Length(9, 0.5, 4, 16)
    assert found["W4"].num_requests == 1 and found["W4"].output == fixed(7) and found["W5"].rate == 2.5
    for wrong in ("W9.rate=1", "W1.colour=1", "W1.output=many"):
        with pytest.raises(typer.BadParameter):
            command_line._lengths(["W1"], None, [wrong])
    for names in (["W1", "W9"], ["all"]):
        with pytest.raises(typer.BadParameter):
            command_line._lengths(names, None, [])


# --- model, tokenizer, limits -------------------------------------------------------------------------------------------


def test_the_shape_is_that_of_smollm2() -> None:
    """134.5 million parameters, 269 MB that a step reads, 23 kB of keys and values per token."""
    assert BIG.num_parameters == 134_515_008
    assert BIG.step_weight_bytes == pytest.approx(269e6, rel=0.001) and BIG.kv_token_bytes == 23_040
    sizes = dict(checkpoints.tensor_shapes(BIG))
    assert sum(rows * (columns or [1])[0] for rows, *columns in sizes.values()) == BIG.num_parameters


def test_shapes_can_be_changed() -> None:
    """By name and numbers; a changed one has another name."""
    name, shape = shapes.parse("bench-15m:layers=2,vocab=600,tied=0")
    assert (name, shape.num_layers, shape.vocab_size, shape.tied) == ("bench-15m-layers2-vocab600-tied0", 2, 600, False)
    assert "lm_head.weight" in dict(checkpoints.tensor_shapes(shape))
    for wrong in ("bench-1t", "bench-15m:layers=two", "bench-15m:depth=2", "bench-15m:heads=5"):
        with pytest.raises(ValueError, match=r"bench-15m|KEY=NUMBER|cannot share"):
            shapes.parse(wrong)


def test_the_tokenizer_has_as_many_tokens_as_the_model() -> None:
    """Merges are real: text becomes them and comes back; every id is text."""
    made = tokens.tokenizer(2_000)
    assert made.get_vocab_size() == 2_000 and made.encode("the ").ids != [ord(c) for c in "the "]
    text = "a line\tof text, with ünïcode"
    assert made.decode(made.encode(text).ids) == text
    assert all(made.id_to_token(i) for i in range(2_000))
    assert [made.token_to_id(name) for name in tokens.SPECIAL] == [shapes.EOS_TOKEN_ID, shapes.BOS_TOKEN_ID]
    names, merges = tokens.vocabulary(49_152)
    assert len(names) == len(set(names)) == 49_152 and len(merges) == 49_152 - 258
    with pytest.raises(ValueError, match="no room"):
        tokens.vocabulary(258)


@pytest.mark.parametrize(("name", "tokens_per_s"), [("W1", 1_020), ("W3", 610), ("W4", 117)])
def test_limits_are_those_published(name: str, tokens_per_s: float) -> None:
    """At 33 GB/s and 430 GFLOP/s the formula gives the limits of the goals, within 4 %."""
    found = limits.limit_tokens_per_s(workload(name, DEFAULTS[name]), BIG, ANCHOR)
    assert found == pytest.approx(tokens_per_s, rel=0.04)


def test_a_limit_by_hand() -> None:
    """Two requests, one shorter: the prompt's step, then steps of two and of one, each at its rate."""
    shape = shapes.ModelShape(100, 8, 16, 2, 2, 1, 4)
    two = Workload("two", (Planned(0, 0.0, "", (5, 6, 7), 3), Planned(1, 0.0, "", (8, 9), 2)))
    rates = limits.Rates(1.0, 10.0, 1e4, 1.0)
    prompt = (5 * shape.body_flops + 2 * shape.head_flops + shape.attention_flops(1) * (4.5 + 2)) / 1e4
    weights = shape.step_weight_bytes / 10
    kv = shape.kv_token_bytes / 10
    assert shape.body_flops + shape.head_flops < weights * 1e4 / 2, "decode steps are bound by memory here"
    assert limits.least_s(two, shape, rates) == pytest.approx(max(weights, prompt) + 2 * weights + (4 + 3 + 5) * kv)
    assert limits.limit_tokens_per_s(workload("W5", workloads.at_rate(DEFAULTS["W5"], 1.0)), shape, rates) is None


def test_the_better_reading_counts() -> None:
    """Each rate for itself."""
    other = limits.Rates(20e9, 30e9, 400e9, 210e9)
    assert limits.best([ANCHOR, other]) == limits.Rates(20e9, 33e9, 430e9, 210e9)


def test_rates_are_read() -> None:
    """On a tiny size, in this process: all four are there, and larger than nothing."""
    import torch

    from benchmarks.compare import limits_reading

    threads = torch.get_num_threads()
    try:
        rates = limits_reading.main(1, 64, 1)
    finally:
        torch.set_num_threads(threads)
    assert min(rates.read_one, rates.read_all, rates.gemm_bf16, rates.gemm_fp32) > 1e6


# --- figures, goals, tables ---------------------------------------------------------------------------------------------


def row(round_: int, engine: str, tokens_per_s: float, name: str = "W1", **more: Any) -> dict[str, Any]:
    """A recorded run."""
    latencies = {figure: 100 / tokens_per_s for figure in figures.LATENCIES}
    return {
        "round": round_,
        "workload": name,
        "engine": engine,
        "tokens_per_s": tokens_per_s,
        "failed": 0,
        **latencies,
        **more,
    }


RECORDED = [
    *(row(i, "quire", value) for i, value in enumerate((90.0, 100.0, 120.0))),
    *(row(i, "vllm", value) for i, value in enumerate((60.0, 50.0, 60.0))),
    *(row(i, "openvino", value) for i, value in enumerate((90.0, 80.0, 96.0))),
]


def recorded(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A result of these runs."""
    engine = {"form": "server", "versions": {"vllm": "1"}, "settings": {}, "now_mb": 1.0, "idle_cpu_share": 0.0}
    return {
        "model": "bench-15m",
        "ours": "quire",
        "workloads": {"W1": {"rate": 0.0}},
        "limits": {"best": dict.fromkeys(limits.Rates.__dataclass_fields__, 1e9), "tokens_per_s": {"W1": 125.0}},
        "engines": {
            "quire": {**engine, "starts_s": [4.0, 6.0, 4.5], "peak_mb": 500.0},
            "vllm": {**engine, "starts_s": [90.0], "peak_mb": 2_000.0},
            "openvino": {**engine, "starts_s": [], "peak_mb": 0.0, "failure": "RuntimeError: no model"},
        },
        "runs": list(rows),
        "tokens": {"checked": 6, "different": ["quire W1 round 1 request 0 from token 3 on"]},
    }


def test_ratios_are_of_one_round() -> None:
    """The median of ratios, not the ratio of medians; rounds where one of both failed do not count."""
    found = figures.ratio(RECORDED, "W1", figures.THROUGHPUT, "quire", "vllm")
    assert found == figures.Spread(2.0, 1.5, 2.0)
    failing = [{**one, "failed": int(one["round"] == 0)} for one in RECORDED]
    assert figures.ratio(failing, "W1", figures.THROUGHPUT, "quire", "vllm") == figures.Spread(2.0, 2.0, 2.0)
    assert figures.ratio(RECORDED, "W1", figures.THROUGHPUT, "quire", "llamacpp") is None
    kept = figures.ratio_table(RECORDED, "quire")
    assert (
        kept["W1"]["vllm"]["tpot_p50_ms"] == {"median": 0.5, "least": 0.5, "most": 0.6667} and "quire" not in kept["W1"]
    )


def test_a_run_becomes_figures() -> None:
    """By the definitions that all load tools here share; other tokens than asked for are a failure."""
    good = Record(0, 0.0, token_times_s=[0.1, 0.2, 0.4], output_tokens=3, ended_s=0.4)
    short = Record(1, 0.0, token_times_s=[0.1], output_tokens=1, ended_s=0.2)
    complete(good, 3)
    complete(short, 3)
    found = figures.of_run(Run([good, short]))
    assert found["failed"] == 1 and found["errors"] == {"1 tokens, 3 asked": 1}
    assert (found["ttft_p50_ms"], found["tpot_p50_ms"], found["tokens_per_s"]) == (100.0, 150.0, 7.5)


def test_goals_are_read_from_a_result() -> None:
    """Only those that it says something about, by the median, in the direction of each."""
    found = {(one.goal, one.what): one for one in goals.verdicts(recorded(RECORDED))}
    assert found["C1", "W1 tokens_per_s / vllm"].is_met
    best = found["C2", "W1 tokens_per_s / openvino"]
    assert best.measured.median == 1.25 and best.is_met
    assert found["C6", "start to the first token, s"].is_met and not found["C6", "peak memory / vllm"].is_met
    assert {goal for goal, _ in found} == {"C1", "C2", "C6"}


def test_tables_show_what_was_recorded() -> None:
    """Medians with their spread, shares of the limit, failures, tokens that differ."""
    said = io.StringIO()
    table.show(recorded(RECORDED), Console(width=200, file=said))
    text = said.getvalue()
    for shown in (
        "100 (90-120)",
        "80%",
        "2.00 (1.50-2.00)",
        "4.5 (4.0-6.0)",
        "no model",
        "5 of 6",
        "from token 3 on",
        "missed",
    ):
        assert shown in text, shown


# --- engines ------------------------------------------------------------------------------------------------------------


def host(tmp_path: Path) -> Host:
    """For command lines; nothing is there."""
    return Host(tmp_path / "model", 2, 64, 2_048, 2, tmp_path / "peers", tmp_path / "logs")


def test_command_lines_of_all_engines(tmp_path: Path) -> None:
    """With the settings at which each is best on these cores, and the same memory for all."""
    every = registry.engines(host(tmp_path), BIG, {"loose": "--no-invariant"}, "--num-threads 2")
    assert set(command_line.ENGINES) | {"quire-loose"} == set(every)
    settings = {name: engine.settings() for name, engine in every.items()}
    assert settings["quire-loose"]["command"][-3:] == ["--num-threads", "2", "--no-invariant"]
    assert settings["quire"]["command"][:5] == ["quire", "up", "--model", "MODEL", "--kv-cache-memory"]
    assert settings["vllm"]["environment"]["VLLM_CPU_OMP_THREADS_BIND"] == "0-1"
    assert {"bfloat16", "64", "--enable-prefix-caching"} <= set(settings["vllm"]["command"])
    assert settings["llamacpp"]["command"][3:5] == ["--ctx-size", str((2 << 30) // BIG.kv_token_bytes)]
    assert settings["openvino"]["properties"]["INFERENCE_NUM_THREADS"] == "2"
    assert not every["transformers"].can("W5") and every["transformers"].can("W4") and every["vllm"].can("W5")
    assert every["quire"].form is Form.SERVER and every["quire-offline"].form is Form.OFFLINE


def test_a_peer_that_is_not_installed_is_said(tmp_path: Path) -> None:
    """And left out; a name that there is not is a mistake."""
    said: list[str] = []
    every = registry.engines(host(tmp_path), BIG, {})
    found = registry.chosen(every, ["vllm", "transformers", "quire"], said.append)
    assert [engine.name for engine in found] == ["quire", "transformers"]
    assert said == ["vllm is left out: not installed: make peers PEERS=vllm"]
    with pytest.raises(KeyError):
        registry.chosen(every, ["vlm"], said.append)


def test_installing_says_what_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The others go on; what is installed with these pins is not installed again."""
    asked: list[str] = []

    def fails(name: str, peers: Path, pip_flags: Sequence[str]) -> None:
        asked.append(name)
        raise subprocess.CalledProcessError(1, ["pip"])

    monkeypatch.setattr(install, "install", fails)
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / ".installed").write_text(install.digest("vllm"))
    install.main(["vllm", "openvino", "llamacpp"], "", tmp_path)
    said = capsys.readouterr()
    assert asked == ["openvino", "llamacpp"] and "vllm is installed" in said.out
    assert said.err.count("cannot be installed and is left out") == 2
    (tmp_path / "vllm" / ".installed").write_text("other pins")
    assert not install.is_current(tmp_path / "vllm", "vllm")
    with pytest.raises(typer.BadParameter):
        install.main(["torch"], "", tmp_path)


class Recorded:
    """An engine whose runs are known. `tokens`: of every request."""

    form, starts_slowly = Form.SERVER, False

    def __init__(self, name: str, calls: list[str], tokens: Sequence[int] = (7, 8), breaks_in: str = "") -> None:
        self.name, self._calls, self._tokens, self._breaks_in = name, calls, list(tokens), breaks_in

    def missing(self) -> str:
        return ""

    def can(self, workload: str) -> bool:
        return True

    def settings(self) -> Mapping[str, Any]:
        return {}

    def versions(self) -> Mapping[str, str]:
        return {}

    def start(self) -> float:
        self._calls.append(f"{self.name} starts")
        return 1.0

    def run(self, workload: Workload) -> Run:
        self._calls.append(f"{self.name} {workload.name}")
        if workload.name == self._breaks_in:
            raise RuntimeError("out of memory")
        count = len(self._tokens)
        records = [
            Record(r.index, 0.0, token_times_s=[0.1], output_tokens=count, ended_s=1.0) for r in workload.requests
        ]
        return Run(records, [self._tokens for _ in workload.requests])

    def pause(self) -> None:
        self._calls.append(f"{self.name} pauses")

    def resume(self) -> None:
        self._calls.append(f"{self.name} resumes")

    def memory(self) -> Memory:
        return Memory(2.0, 1.0)

    def cpu_s(self) -> float:
        return 0.0

    def stop(self) -> None:
        self._calls.append(f"{self.name} stops")


def test_rounds_turn_the_order_and_freeze_peers() -> None:
    """Each workload goes to all in turn; a peer is frozen when it is not its turn, Quire is not; all are stopped at the end."""
    calls: list[str] = []
    with Rounds([Recorded("quire", calls), Recorded("peer", calls)], lambda line: None, fresh=False) as rounds:
        rounds.run(["A", "B"], lambda name, round_: workload(name, Lengths(1, fixed(4), fixed(2)), round_), 2, {})
    runs = [call for call in calls if call.split()[1] in {"A", "B"}]
    assert runs == ["quire A", "peer A", "quire B", "peer B", "peer A", "quire A", "peer B", "quire B"]
    assert calls[:4] == ["quire starts", "quire A", "peer starts", "peer A"] and calls.count("peer starts") == 2
    assert calls.count("peer pauses") == 4 and calls[-2:] == ["quire stops", "peer stops"]
    assert "quire pauses" not in calls and rounds.standings[1].facts()["starts_s"] == [1.0, 1.0]


def test_an_engine_that_fails_runs_no_more() -> None:
    """The others go on, and the result says why."""
    calls: list[str] = []
    with Rounds(
        [Recorded("quire", calls), Recorded("peer", calls, breaks_in="A")], lambda line: None, fresh=False
    ) as rounds:
        rounds.run(["A", "B"], lambda name, round_: workload(name, Lengths(1, fixed(4), fixed(2)), round_), 1, {})
    assert [one["engine"] for one in rounds.rows] == ["quire", "quire"]
    assert rounds.standings[1].facts()["failure"] == "RuntimeError: out of memory" and "peer B" not in calls


def test_tokens_are_compared_with_those_computed_alone() -> None:
    """Of the requests that were sampled, in every round; the first place that differs is told."""
    draw = lambda name, round_: workload(name, Lengths(4, fixed(4), fixed(2)), round_)  # noqa: E731
    alone = references(Recorded("reference", [], tokens=[7, 9]).run, ["A"], draw, 2, 2)
    assert sorted(alone) == [("A", 0, 0), ("A", 0, 2), ("A", 1, 0), ("A", 1, 2)]
    with Rounds([Recorded("quire", []), Recorded("peer", [])], lambda line: None, fresh=False) as rounds:
        rounds.run(["A"], draw, 2, alone)
    assert rounds.num_checked == 4
    assert rounds.differences[0] == "quire A round 1 request 0 from token 1 on"


# --- wires and children -------------------------------------------------------------------------------------------------


async def asked(reply: bytes, path: str, ask: Any) -> tuple[Any, bytes]:
    """What `ask(port)` gives while a server answers one request with `reply`, in pieces of seven bytes; and what was asked."""
    requests: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next((int(line[15:]) for line in head.splitlines() if line.lower().startswith(b"content-length:")), 0)
        requests.append(head.split(b"\r\n")[0] + b"\n" + await reader.readexactly(length))
        for begin in range(0, len(reply), 7):
            writer.write(reply[begin : begin + 7])
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        found = await ask(server.sockets[0].getsockname()[1])
    assert path.encode() in requests[0]
    return found, requests[0].partition(b"\n")[2]


def chunked(*chunks: bytes) -> bytes:
    """A streamed reply of these chunks."""
    body = b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks)
    return (
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        + body
        + b"0\r\n\r\n"
    )


async def collected(events: AsyncIterator[bytes]) -> list[bytes]:
    """All of them."""
    return [event async for event in events]


def test_events_are_cut_out_of_chunks() -> None:
    """Lines may be cut anywhere; comments are skipped; [DONE] ends it; a refusal is told; without chunks it works too."""
    reply = chunked(b'data: {"a"', b": 1}\n\ndata:2\n\n: ping\n", b"data: [DONE]\n\ndata: 3\n\n")
    found, _ = asyncio.run(asked(reply, "/x", lambda port: collected(sse.post("127.0.0.1", port, "/x", b"{}"))))
    assert found == [b'{"a": 1}', b"2"]
    plain = b"HTTP/1.1 200 OK\r\n\r\ndata: 1\n\ndata: 2\n\n"
    assert asyncio.run(asked(plain, "/x", lambda port: collected(sse.post("127.0.0.1", port, "/x", b""))))[0] == [
        b"1",
        b"2",
    ]
    refusal = b"HTTP/1.1 503 Busy\r\nContent-Length: 4\r\n\r\nfull"
    with pytest.raises(RuntimeError, match="HTTP 503: full"):
        asyncio.run(asked(refusal, "/x", lambda port: collected(sse.post("127.0.0.1", port, "/x", b""))))
    assert asyncio.run(asked(refusal, "/health", lambda port: sse.get_status("127.0.0.1", port, "/health")))[0] == 503


PLANNED = Planned(0, 0.0, "", (5, 6), 3)
WIRES = {
    "/v1/completions": (
        lambda port: wires.OpenAIWire("127.0.0.1", port, "m", {"return_token_ids": True}),
        [
            {"choices": [{"text": "", "token_ids": [7]}]},
            {"choices": [{"text": "ab", "token_ids": [8, 9]}]},
            {"choices": [], "usage": {"completion_tokens": 3}},
        ],
        {"prompt": [5, 6], "max_tokens": 3, "ignore_eos": True, "temperature": 0.0, "return_token_ids": True},
    ),
    "/completion": (
        lambda port: wires.LlamaCppWire("127.0.0.1", port),
        [
            {"content": "", "tokens": [7], "stop": False},
            {"content": "ab", "tokens": [8, 9], "stop": False},
            {"content": "", "tokens": [], "stop": True},
        ],
        {"prompt": [5, 6], "n_predict": 3, "ignore_eos": True, "temperature": 0.0},
    ),
}


@pytest.mark.parametrize("path", WIRES)
def test_wires_of_peers(path: str) -> None:
    """Token ids go out; tokens that come are stamped, those of one message once."""
    make, events, wanted = WIRES[path]
    reply = chunked(*(b"data: %s\n\n" % json.dumps(event).encode() for event in events))
    record, clock = Record(0, 0.0), iter(range(100)).__next__
    found, body = asyncio.run(asked(reply, path, lambda port: make(port).ask(PLANNED, record, clock)))
    assert found == [7, 8, 9] and record.output_tokens == 3 and record.token_times_s == [0, 1]
    assert {key: json.loads(body)[key] for key in wanted} == wanted


def test_stepped_children_hand_requests_over_when_they_are_due() -> None:
    """Not before, and between two steps."""
    import time

    seen: list[tuple[int, int]] = []

    class Counting:
        def __init__(self) -> None:
            self.live: list[child.Asked] = []

        def add(self, request: child.Asked) -> None:
            self.live.append(request)

        def step(self, began: float) -> None:
            for request in self.live:
                request.take(time.perf_counter() - began, [request.index])
                seen.append((request.index, len(request.tokens)))
            self.live = [request for request in self.live if len(request.tokens) < request.max_tokens]

        def has_unfinished(self) -> bool:
            return bool(self.live)

    requests = [child.Asked(0, 0.03, [1], 2), child.Asked(1, 0.0, [1], 1)]
    child.run_stepped(Counting(), requests, time.perf_counter())
    assert seen == [(1, 1), (0, 1), (0, 2)] and requests[0].events[0][0] >= 0.03 and requests[0].tokens == [0, 0]


# --- the whole ----------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_quire_alone(tmp_path: Path) -> None:
    """A real run on a small model: both doors and `LLM` give the tokens of each request alone; there are a result and a picture."""
    out, picture = tmp_path / "compare.json", tmp_path / "compare.png"
    sizes = ("W1.output=12", "W2.output=10", "W3.output=6", "W3.shared=64", "W4.output=12", "W5.output=8", "W5.rate=20")
    arguments = [
        "--model",
        "bench-15m:layers=2,vocab=2000",
        "--engines",
        "quire,quire-http,quire-offline",
        "--rounds",
        "1",
    ]
    arguments += ["--requests", "6", "--kv-gib", "1", "--cache", str(tmp_path / "cache"), "--out", str(out)]
    arguments += [part for size in sizes for part in ("--set", size)]
    command = [sys.executable, "-m", "benchmarks.compare", *arguments, "--plot", str(picture)]
    environ = child_environment(os.environ)
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-2_000:]
    result = json.loads(out.read_text(encoding="utf-8"))
    assert len(result["runs"]) == 3 * 6 and not any(run["failed"] for run in result["runs"])
    assert result["tokens"] == {"checked": 2 * 11, "different": []}
    assert min(result["engines"]["quire"]["starts_s"]) > 0.5 and result["engines"]["quire"]["peak_mb"] > 200
    assert result["ratios"]["W1"]["quire-offline"]["tokens_per_s"]["median"] > 0
    assert picture.stat().st_size > 10_000 and "quire-offline" in done.stdout and "C7" in done.stdout
