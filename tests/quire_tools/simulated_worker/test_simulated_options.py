"""The simulated worker yields what the wire can ask for: children, candidates, drafts, log probabilities, vectors."""

import numpy as np
import pytest

from protos.common.v1 import common_pb2
from protos.worker.v1 import worker_pb2
from quire_tools.simulated_worker.bundle import END_OF_TEXT
from quire_tools.simulated_worker.engine import SimulatedEngine
from svc_common import wire_arrays
from tests.support.worker.builders import Change, Row, rare, step, tokens_by_row
from tests.support.worker.running import fast

PROMPT = [10, 20, 30, 40, 50]
F32 = wire_arrays.F32
Sampling = common_pb2.ResolvedSampling


def engine(**values: object) -> SimulatedEngine:
    made = SimulatedEngine(fast(**values))
    made.load(lambda stage, fraction: None)
    made.allocate(64, 16)
    return made


def row(**fields: object) -> Row:
    return Row(0, PROMPT, range(16), 5, **fields)


def stream(num_tokens: int, made: SimulatedEngine | None = None, **fields: object) -> list[int]:
    made = made or engine()
    tokens = tokens_by_row(made.execute(step(add=[row(**fields)])))[0]
    while len(tokens) < num_tokens:
        tokens += tokens_by_row(made.execute(step()))[0]
    return tokens


def test_children_are_the_first_tokens_of_their_sequences() -> None:
    made = engine()
    first = made.execute(step(add=[row(temperature=1.0, seed=5, index=2, options=rare(num_children=3))]))
    alone = [stream(4, temperature=1.0, seed=5, index=index) for index in (2, 3, 4)]
    assert tokens_by_row(first)[0] == [tokens[0] for tokens in alone]
    assert len({tokens[0] for tokens in alone}) > 1
    assert [tokens_by_row(made.execute(step()))[0] for _ in range(3)] == [[t] for t in alone[0][1:]]


def candidates(result: worker_pb2.WorkerOutputs) -> tuple[list[int], list[float]]:
    found = result.candidates
    assert wire_arrays.unpack(found.counts, "counts").tolist() == [len(found.token_ids) // 4]
    return wire_arrays.unpack(found.token_ids, "ids").tolist(), wire_arrays.unpack(
        found.logprobs, "logprobs", F32
    ).tolist()


def test_beams_yield_candidates_and_wait() -> None:
    made = engine()
    result = made.execute(step(add=[row(options=rare(num_candidates=4))]))
    ids, logprobs = candidates(result)
    assert (len(set(ids)), sorted(logprobs, reverse=True), result.rows) == (4, logprobs, b"")
    assert made.execute(step()).num_computed_tokens == 0
    told = made.execute(step(change=[Change(0, 1, told=[ids[2]])]))
    again = engine().execute(step(add=[Row(0, [*PROMPT, ids[2]], range(16), 6, options=rare(num_candidates=4))]))
    assert candidates(told) == candidates(again)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 9}], ids=["greedy", "sampled"])
def test_drafts_change_no_stream_and_save_steps(sampling: dict[str, object]) -> None:
    expected = stream(24, **sampling)
    made = engine()
    tokens, num_steps = tokens_by_row(made.execute(step(add=[row(**sampling)])))[0], 1
    accepted = set()
    while len(tokens) < 24:
        new = tokens_by_row(made.execute(step(change=[Change(0, 4, num_drafts=3)])))[0]
        accepted.add(len(new) - 1)
        tokens, num_steps = tokens + new, num_steps + 1
    assert tokens[:24] == expected
    assert num_steps < 20
    assert len(accepted) > 1, "some guesses are wrong"


def test_log_probabilities_of_tokens_and_prompts() -> None:
    made = engine()
    options = rare(Sampling(num_top_logprobs=3, num_prompt_logprobs=2))
    result = made.execute(step(add=[Row(0, PROMPT, range(16), 3, logprobs=True, options=options)]))
    (prompt,) = result.prompt_logprobs
    assert (prompt.row, prompt.start, prompt.num_top, len(prompt.logprobs)) == (0, 1, 2, 12)
    assert wire_arrays.unpack(prompt.top_token_ids, "ids").tolist()[::2] == PROMPT[1:4]
    result = made.execute(step(change=[Change(0, 2)]))
    assert (result.prompt_logprobs[0].start, len(result.prompt_logprobs[0].logprobs)) == (4, 4)
    tops = wire_arrays.unpack(result.tops.token_ids, "ids").tolist()
    assert (tops[0], len(tops)) == (tokens_by_row(result)[0][0], 3)
    assert (
        wire_arrays.unpack(result.tops.logprobs, "logprobs", F32)[0] == wire_arrays.unpack(result.logprobs, "l", F32)[0]
    )


def test_a_vector_is_a_function_of_the_prompt() -> None:
    def vector(*counts: int) -> list[float]:
        made, options = engine(), rare(task=common_pb2.TASK_EMBED_MEAN)
        result = made.execute(step(add=[Row(0, PROMPT, range(16), counts[0], options=options)]))
        for count in counts[1:]:
            result = made.execute(step(change=[Change(0, count)]))
        (found,) = result.embeddings
        assert (found.row, found.incarnation, result.rows) == (0, 1, b"")
        assert made.execute(step()).num_computed_tokens == 0
        return wire_arrays.unpack(found.values, "values", F32).tolist()

    assert vector(5) == vector(2, 2, 1)
    assert np.ptp(vector(5)) > 0


def test_min_tokens_holds_back_the_end() -> None:
    ending = stream(12, engine(eos_probability=0.5))
    options = rare(min_tokens=8, min_tokens_ids=wire_arrays.pack([END_OF_TEXT]))
    held = stream(12, engine(eos_probability=0.5), options=options)
    assert END_OF_TEXT in ending[:8]
    assert END_OF_TEXT not in held[:8]
    assert END_OF_TEXT in held[8:]
