"""What the comparison with peers asks, and of what: workloads, shapes, tokenizer, limits."""

import pytest

from benchmarks.compare import checkpoints, limits, shapes, tokens, workloads
from benchmarks.compare.workloads import DEFAULTS, Workload
from quire_tools.bench.workloads import PlannedRequest
from tests.benchmarks.compare.compare_cases import BIG, VOCAB, workload

# The rates at which the published limits of W1, W3 and W4 were computed.
ANCHOR = limits.Rates(read_one=18e9, read_all=33e9, gemm_bf16=430e9, gemm_fp32=200e9)


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
    for rate in (0.0, 1.0):
        at_other_rate = workload("W5", workloads.at_rate(DEFAULTS["W5"], rate)).requests
        assert [r.token_ids for r in at_other_rate] == [r.token_ids for r in first.requests]


def test_the_shared_prefix_is_shared() -> None:
    """512 tokens in all prompts of W3, none in others, not even in one prompt alone."""
    assert limits.shared_prefix(workload("W3", DEFAULTS["W3"])) == 512
    assert limits.shared_prefix(workload("W1", DEFAULTS["W1"])) == 0
    assert limits.shared_prefix(workload("W4", DEFAULTS["W4"])) == 0


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
    two = Workload("two", (PlannedRequest(0, 0.0, "", (5, 6, 7), 3), PlannedRequest(1, 0.0, "", (8, 9), 2)))
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
    assert (ANCHOR.gemm, limits.Rates(20e9, 30e9, 2e9, 80e9).gemm) == (430e9, 80e9)


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
