"""The simulated engine: tokens are a function of tokens, and wrong block tables are caught."""

import subprocess
import sys

import numpy as np
import pytest
from tokenizers import Tokenizer

from protos.worker.v1 import worker_pb2
from quire_tools.simulated_worker.bundle import END_OF_TEXT
from quire_tools.simulated_worker.engine import SimulatedEngine
from svc_common import wire_arrays
from svc_common.errors import FailedPrecondition
from tests.support.worker.builders import Change, Row, step, tokens_by_row
from tests.support.worker.running import fast


def engine(**values: object) -> SimulatedEngine:
    made = SimulatedEngine(fast(**values))
    made.load(lambda stage, fraction: None)
    made.allocate(64, 16)
    return made


def decode(made: SimulatedEngine, num_steps: int, row: int = 0) -> list[int]:
    return [token for _ in range(num_steps) for token in tokens_by_row(made.execute(step()))[row]]


PROMPT = [10, 20, 30, 40, 50]


def undisturbed(num_tokens: int, **sampling: object) -> list[int]:
    made = engine()
    first = tokens_by_row(made.execute(step(add=[Row(0, PROMPT, range(8), 5, **sampling)])))[0]
    return first + decode(made, num_tokens - 1)


def test_tokens_do_not_depend_on_batch_chunks_or_blocks() -> None:
    made = engine()
    other = Row(3, [1, 2, 3], range(40, 48), 3)
    made.execute(step(add=[Row(0, PROMPT, [9, 33, 2, 17], 2), other]))
    made.execute(step(change=[Change(0, 2)]))
    tokens = tokens_by_row(made.execute(step(change=[Change(0, 1)])))[0]
    assert tokens + decode(made, 7) == undisturbed(8)
    assert len(set(undisturbed(16))) > 5, "diverse, or the comparison says little"


def test_recompute_after_preemption_goes_on_with_the_same_tokens() -> None:
    """The tokens are the ones an undisturbed run would have given."""
    made = engine()
    tokens = tokens_by_row(made.execute(step(add=[Row(0, PROMPT, range(8), 5)])))[0] + decode(made, 3)
    known = PROMPT + tokens
    back = Row(0, known, range(20, 28), len(known), incarnation=2, num_prompt=5)
    tokens += tokens_by_row(made.execute(step(remove=[0], add=[back])))[0]
    assert tokens + decode(made, 3) == undisturbed(8)


def test_swap_out_and_in_keeps_the_content() -> None:
    made = engine()
    tokens = tokens_by_row(made.execute(step(add=[Row(0, PROMPT, [0, 1], 5)])))[0]
    made.execute(step(remove=[0], swap_out=[(0, 5), (1, 6)]))
    made.execute(step(add=[Row(1, [7] * 8, [0, 1], 8)]))
    back = Row(0, PROMPT + tokens, [30, 31, 32], 1, incarnation=2, num_computed=5, num_prompt=5)
    tokens += tokens_by_row(made.execute(step(swap_in=[(5, 30), (6, 31)], add=[back], change=[Change(1, 0)])))[0]
    assert tokens + decode(made, 2) == undisturbed(4)


def test_copy_on_write_and_prefix_hit() -> None:
    made = engine()
    made.execute(step(add=[Row(0, PROMPT, [0, 1], 5)]))
    fork = Row(1, PROMPT, [0, 9], 1, num_computed=4)
    assert tokens_by_row(made.execute(step(add=[fork], change=[Change(0, 0)])))[1] == undisturbed(1)
    made.execute(step(copy=[(0, 20), (1, 21)], change=[Change(1, 0)]))
    copied = Row(2, PROMPT, [20, 21], 1, num_computed=4)
    assert tokens_by_row(made.execute(step(add=[copied])))[2] == undisturbed(1)


def test_sampled_tokens_depend_on_seed_and_sequence_index_greedy_ones_do_not() -> None:
    greedy = undisturbed(12)
    assert undisturbed(12, seed=5) == greedy
    drawn = undisturbed(12, seed=5, temperature=1.0)
    assert drawn == undisturbed(12, seed=5, temperature=0.7)
    assert len({tuple(greedy), tuple(drawn), tuple(undisturbed(12, seed=6, temperature=1.0))}) == 3
    assert undisturbed(12, seed=5, index=1, temperature=1.0) != drawn


def test_block_that_was_given_away_too_early_is_caught() -> None:
    made = engine()
    made.execute(step(add=[Row(0, PROMPT, [0, 1, 2], 5)]))
    made.execute(step(add=[Row(1, [7] * 6, [3, 1], 6)], change=[Change(0, 0)]))
    with pytest.raises(FailedPrecondition, match=r"r0/0 .* block 1 does not hold") as caught:
        made.execute(step(change=[Change(0, 1), Change(1, 0)]))
    assert caught.value.reason == "KV_LOST"


@pytest.mark.parametrize("tokens", [[10, 20, 30, 41, 50], [11, 20, 30, 40, 50]])
def test_prefix_hit_on_blocks_of_another_prefix_is_caught(tokens: list[int]) -> None:
    made = engine()
    made.execute(step(add=[Row(0, PROMPT, [0, 1], 5)]))
    with pytest.raises(FailedPrecondition, match="does not hold"):
        made.execute(step(add=[Row(1, tokens, [0, 9], 1, num_computed=4)]))


def test_two_rows_writing_one_block_are_caught_and_the_step_is_void() -> None:
    made = engine()
    made.execute(step(add=[Row(5, PROMPT, range(50, 58), 5)]))
    with pytest.raises(FailedPrecondition, match="block 3 is written by r0/0 and r1/0"):
        made.execute(step(add=[Row(0, [1], [3], 1), Row(1, [2], [3], 1)]))
    result = made.execute(step(remove=[0, 1], change=[Change(5, 1)]))
    assert list(tokens_by_row(result)) == [5]


def test_reset_forgets_rows_and_content() -> None:
    made = engine()
    made.execute(step(add=[Row(0, PROMPT, [0, 1], 5)]))
    made.reset()
    with pytest.raises(FailedPrecondition, match="does not hold"):
        made.execute(step(add=[Row(0, PROMPT, [0, 1], 1, num_computed=4)]))


def test_cost_model_charges_by_tokens_rows_and_context() -> None:
    waited: list[float] = []
    costs = {"step_base_s": 1.0, "prefill_token_s": 0.1, "decode_row_s": 0.01, "context_token_s": 0.001}
    made = SimulatedEngine(fast(time_scale=2.0, **costs), sleep=waited.append)
    made.allocate(64, 16)
    made.execute(step(add=[Row(0, PROMPT, [0, 1, 2], 5)]))
    made.execute(step(add=[Row(1, [1, 2], [5, 6], 2)]))
    assert waited == pytest.approx([2 * (1 + 0.5 + 0.005), 2 * (1 + 0.2 + 0.01 + 0.006 + 0.002)])


def test_counts_and_logprobs() -> None:
    made = engine()
    result = made.execute(step(add=[Row(0, PROMPT, [0, 1, 2], 5, logprobs=True), Row(1, [1, 2, 3], [5, 6], 1)]))
    assert result.num_computed_tokens == 6
    logprobs = wire_arrays.unpack(result.logprobs, "logprobs", wire_arrays.F32)
    assert len(logprobs) == 1
    assert logprobs[0] <= 0
    result = made.execute(step(change=[Change(0, 0), Change(1, 2)]))
    assert result.logprobs == b""


def test_ends_only_when_told_to() -> None:
    assert END_OF_TEXT not in undisturbed(16)
    made = engine(eos_probability=1.0)
    assert tokens_by_row(made.execute(step(add=[Row(0, PROMPT, range(8), 5)])))[0] == [END_OF_TEXT]


def test_bundle_has_a_tokenizer_that_round_trips_any_text() -> None:
    """A gateway serves it from the bundle alone."""
    bundle = worker_pb2.ModelBundle.FromString(engine().bundle())
    tokenizer = Tokenizer.from_str(bundle.tokenizer_json.decode())
    text = "def f(x):\n\treturn 'äöü 漢字 🙂\x00\x7f'"
    ids = tokenizer.encode(text).ids
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode("a<|endoftext|>").ids == [ord("a"), END_OF_TEXT]
    assert list(bundle.limits.eos_token_ids) == [END_OF_TEXT]
    assert bundle.limits.bundle_digest == ""
    assert tokenizer.decode(undisturbed(16)).isascii()


def test_simulated_worker_imports_no_torch() -> None:
    script = "import sys, worker_svc.app; print(sorted({'torch', 'transformers', 'tokenizers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_256_rows_run_at_well_over_100_steps_per_second() -> None:
    """The engine itself must not be what limits a 256-sequence run."""
    import time

    made = SimulatedEngine(fast(max_model_len=2048, num_gpu_blocks=20_000, block_size=16))
    made.allocate(20_000, 0)
    made.execute(step(add=[Row(i, [1] * 64, range(70 * i, 70 * i + 70), 64) for i in range(256)]))
    times = []
    for _ in range(30):
        begin = time.thread_time()
        made.execute(step())
        times.append(time.thread_time() - begin)
    assert np.median(times) < 0.005
