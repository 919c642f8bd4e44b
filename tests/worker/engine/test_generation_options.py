"""Options of rows on a real model: drafts, children, beams, log probabilities of prompts, vectors, all in one batch."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from protos.common.v1 import common_pb2
from protos.worker.v1 import worker_pb2
from svc_common import wire_arrays
from svc_common.errors import InvalidArgument
from tests.support.checkpoints import make_checkpoint
from tests.support.cuda import NEEDS_INVARIANCE
from tests.support.worker.builders import Change, Row, rare, step, tokens_by_row
from tests.support.worker.driver import make_engine
from tests.support.worker.sampled_rows import Options, ToyMasks, toy_allows
from tests.worker.engine.test_sampling_options import random_options
from worker_svc.executor.model_engine import ModelEngine
from worker_svc.executor.step_runner import StepRunner, _task_guard
from worker_svc.rows.batch import StepBatch
from worker_svc.sampling import prompt_scores
from worker_svc.sampling.draft_proposer import DraftAsk, NgramProposer

F32, U8 = wire_arrays.F32, wire_arrays.U8
PROMPT = list(b"def main(argv: list[str]) -> int:\n    return 0\n")
NUM_TOKENS = 12
# Blocks of a row, by its index: room for all tests' tokens.
ROOM = 8


@dataclass
class Oracle:
    """Guesses from streams known beforehand, each wrong now and then; `streams` by row: prompt and output."""

    streams: dict[int, list[int]] = field(default_factory=dict)
    num_asked: int = 0
    follows: bool = False

    def propose(self, asks: Sequence[DraftAsk]) -> list[np.ndarray]:
        return [self._guess(ask) for ask in asks]

    def _guess(self, ask: DraftAsk) -> np.ndarray:
        self.num_asked += 1
        num_known = len(ask.token_ids)
        assert ask.token_ids.tolist() == self.streams[ask.row][:num_known]
        guess = self.streams[ask.row][num_known : num_known + ask.num_tokens]
        if self.num_asked % 3 == 0 and guess:
            guess[-1] = (guess[-1] + 1) % 40
        return np.array(guess, np.int32)

    def follow(self, batch: StepBatch) -> None:
        raise AssertionError("it does not follow")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_checkpoint("llama", tmp_path_factory.mktemp("checkpoint") / "llama")


@pytest.fixture(scope="module")
def loaded(path):
    engine = make_engine(path, num_blocks=ROOM * 64)
    engine.profile(256, 64)
    engine.allocate(ROOM * 64, 4)
    return engine


@pytest.fixture(scope="module")
def reference(path):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@pytest.fixture
def engine(loaded: ModelEngine):
    """Empty, with toy grammars and the n-gram proposer."""
    equip(loaded, NgramProposer())
    return loaded


def equip(engine: ModelEngine, proposer: object) -> None:
    engine.reset()
    engine._runner = StepRunner(
        engine._loaded.model,
        engine.cache,
        engine._rows,
        engine.row_rule,
        queue=engine._loaded.device.queue(),
        masks=ToyMasks(),
        proposer=proposer,
    )


def row_of(index: int, options: Options) -> Row:
    return replace(options.row(index), blocks=range(ROOM * index, ROOM * index + ROOM))


def join(at: int, num_tokens: int | None = None, *, tokens: Sequence[int] = PROMPT, **fields: object) -> Row:
    num_tokens = len(tokens) if num_tokens is None else num_tokens
    return Row(at, tokens, range(ROOM * at, ROOM * at + ROOM), num_tokens, **fields)


def logprobs_of(result: worker_pb2.WorkerOutputs) -> list[float]:
    return wire_arrays.unpack(result.logprobs, "logprobs", F32).tolist()


def flags_of(result: worker_pb2.WorkerOutputs) -> dict[int, int]:
    rows = wire_arrays.unpack(result.rows, "rows").tolist()
    return dict(zip(rows, wire_arrays.unpack(result.flags, "flags", U8).tolist(), strict=True))


# --- drafts ----------------------------------------------------------------------------------------------------------


def streams(engine: ModelEngine, rows: Sequence[Options], num_drafts: int) -> tuple[dict[int, list[int]], int]:
    """What each row yields, NUM_TOKENS of it, all rows in one batch; and how many steps that took."""
    found = tokens_by_row(engine.execute(step(add=[row_of(i, options) for i, options in enumerate(rows)])))
    num_steps = 1
    while min(len(tokens) for tokens in found.values()) < NUM_TOKENS:
        changes = [Change(row, 1 + num_drafts, num_drafts=num_drafts) for row in found] if num_drafts else []
        for row, tokens in tokens_by_row(engine.execute(step(change=changes))).items():
            found[row] += tokens
        num_steps += 1
    return {row: tokens[:NUM_TOKENS] for row, tokens in found.items()}, num_steps


@pytest.mark.parametrize("seed", range(3))
def test_streams_are_the_same_with_and_without_drafts_under_all_options(engine, seed):
    """R150: drafts come from the worker; one is accepted iff the sampler draws it, and every rule sees each place."""
    rng = random.Random(seed)
    rows = [replace(random_options(rng), num_tops=0) for _ in range(16)]
    expected, num_plain = streams(engine, rows, 0)
    assert len({tuple(tokens) for tokens in expected.values()}) > 12
    full = {row: options.prompt + options.output + expected[row] for row, options in enumerate(rows)}
    equip(engine, Oracle(full))
    guessed, num_guessed = streams(engine, rows, 4)
    assert guessed == expected
    assert num_guessed < num_plain
    equip(engine, NgramProposer())
    assert streams(engine, rows, 3)[0] == expected


@pytest.mark.parametrize("num_rows", [16, pytest.param(64, marks=pytest.mark.long)])
@NEEDS_INVARIANCE
def test_a_row_has_the_same_tokens_alone_and_in_a_batch(engine, num_rows):
    """All options, all rows beside each other, then one by one."""
    assert engine.invariant
    rng = random.Random(num_rows)
    rows = [replace(random_options(rng), num_tops=0) for _ in range(num_rows)]
    together, _ = streams(engine, rows, 0)
    for i, options in enumerate(rows):
        engine.reset()
        alone, _ = streams(engine, [options], 0)
        assert alone[0] == together[i]
    print(f"{num_rows} rows alone and in one batch; the whole size is 64")


def test_drafts_in_a_message_of_several_steps(engine):
    """The first step guesses, the further ones compute one token each."""
    rows = [Options(seed=1), Options(seed=2, repetition=1.3)]
    expected, _ = streams(engine, rows, 0)
    equip(engine, Oracle({i: o.prompt + expected[i] for i, o in enumerate(rows)}))
    found = tokens_by_row(engine.execute(step(add=[row_of(i, options) for i, options in enumerate(rows)])))
    result = engine.execute(step(change=[Change(0, 4, num_drafts=3)], num_decode_steps=3))
    new = tokens_by_row(result)
    assert (len(new[0]) > 3, len(new[1])) == (True, 3)
    for i in (0, 1):
        tokens = found[i] + new[i]
        assert tokens == expected[i][: len(tokens)]


def test_ngram_guesses_save_steps_on_a_repetitive_row(engine):
    """A row that says one thing over and over: guessed, with the tokens it had without."""
    rows = [Options(prompt=[7, 8, 9] * 5, temperature=0.0, allowed=[7])]
    expected, num_plain = streams(engine, rows, 0)
    engine.reset()
    guessed, num_guessed = streams(engine, rows, 4)
    assert guessed == expected
    assert num_guessed <= num_plain / 2


@NEEDS_INVARIANCE
def test_log_probabilities_of_drafted_tokens_are_those_of_single_steps(engine):
    """Bitwise under the invariance contract, the likeliest beside them too."""
    assert engine.invariant
    options = rare(common_pb2.ResolvedSampling(num_top_logprobs=2))
    plain = [engine.execute(step(add=[join(0, logprobs=True, options=options)], num_decode_steps=6))]
    (tokens,) = tokens_by_row(plain[0]).values()
    equip(engine, Oracle({0: PROMPT + tokens}))
    guessed = [engine.execute(step(add=[join(0, logprobs=True, options=options)]))]
    guessed.append(engine.execute(step(change=[Change(0, 5, num_drafts=4)])))
    assert [t for result in guessed for t in tokens_by_row(result)[0]] == tokens
    assert [x for result in guessed for x in logprobs_of(result)] == logprobs_of(plain[0])
    assert b"".join(result.tops.logprobs for result in guessed) == plain[0].tops.logprobs


# --- children and beams ----------------------------------------------------------------------------------------------


def test_children_are_the_first_tokens_of_the_sequences_alone(engine):
    """The row goes on with its own; a child added as a row of its own goes on with its."""
    sampling = {"temperature": 1.3, "seed": 5}
    result = engine.execute(step(add=[join(0, index=1, options=rare(num_children=3), **sampling), join(1)]))
    children = tokens_by_row(result)[0]
    born = [join(2 + i, tokens=[*PROMPT, token], index=2 + i, **sampling) for i, token in enumerate(children[1:])]
    following = tokens_by_row(engine.execute(step(add=[replace(row, num_prompt=len(PROMPT)) for row in born])))
    found = [[children[0], *following[0]], [children[1], *following[2]], [children[2], *following[3]]]
    engine.reset()
    alone = engine.execute(step(add=[join(i, index=1 + i, **sampling) for i in range(3)], num_decode_steps=2))
    assert found == list(tokens_by_row(alone).values())
    assert len(set(children)) > 1


def candidates_by_row(result: worker_pb2.WorkerOutputs) -> dict[int, list[tuple[int, float]]]:
    found = result.candidates
    counts = wire_arrays.unpack(found.counts, "counts")
    ids = wire_arrays.split(wire_arrays.unpack(found.token_ids, "ids"), counts, "ids")
    logprobs = wire_arrays.split(wire_arrays.unpack(found.logprobs, "logprobs", F32), counts, "logprobs")
    pairs = [list(zip(i.tolist(), x.tolist(), strict=True)) for i, x in zip(ids, logprobs, strict=True)]
    return dict(zip(wire_arrays.unpack(found.rows, "rows").tolist(), pairs, strict=True))


def beam_search(reference, prompt: list[int], width: int, num_tokens: int) -> list[tuple[list[int], float]]:
    """The textbook, on whole sequences."""
    beams = [(list(prompt), 0.0)]
    for _ in range(num_tokens):
        with torch.inference_mode():
            scores = [torch.log_softmax(reference(torch.tensor([tokens])).logits[0, -1], -1) for tokens, _ in beams]
        options = [
            ([*tokens, token], total + float(logprobs[token]))
            for (tokens, total), logprobs in zip(beams, scores, strict=True)
            for token in logprobs.topk(width).indices.tolist()
        ]
        beams = sorted(options, key=lambda option: -option[1])[:width]
    return [(tokens[len(prompt) :], total) for tokens, total in beams]


def test_beams_equal_a_hand_computation(engine, reference):
    """Rows that stay are told their token, others leave and new ones join with theirs, beside a row that just decodes."""
    width, options = 3, rare(num_candidates=3)
    plain = tokens_by_row(engine.execute(step(add=[join(0)], num_decode_steps=6)))[0]
    engine.reset()
    result = engine.execute(step(add=[join(0), join(1, options=options)]))
    beams, company, lives = {1: (list(PROMPT), 0.0)}, tokens_by_row(result)[0], dict.fromkeys(range(9), 1)
    for _ in range(4):
        found = candidates_by_row(result)
        ways = [(total + x, row, token) for row, (_, total) in beams.items() for token, x in found[row]]
        best = sorted(ways, reverse=True)[:width]
        heirs: dict[int, tuple[list[int], float]] = {}
        added, changed, removed = [], [], [row for row in beams if row not in {row for _, row, _ in best}]
        free = [row for row in range(1, 9) if row not in beams] + removed
        for total, parent, token in best:
            tokens = [*beams[parent][0], token]
            if parent not in heirs:
                heirs[parent] = (tokens, total)
                changed.append(Change(parent, 1, told=[token], incarnation=lives[parent]))
            else:
                row = free.pop(0)
                lives[row] += 1
                heirs[row] = (tokens, total)
                new = join(row, tokens=tokens, options=options, incarnation=lives[row])
                added.append(replace(new, num_prompt=len(PROMPT)))
        beams = heirs
        result = engine.execute(step(add=added, change=changed, remove=removed))
        company += tokens_by_row(result)[0]
    made = sorted(((tokens[len(PROMPT) :], total) for tokens, total in beams.values()), key=lambda beam: -beam[1])
    expected = beam_search(reference, PROMPT, width, 4)
    assert [tokens for tokens, _ in made] == [tokens for tokens, _ in expected]
    np.testing.assert_allclose([x for _, x in made], [x for _, x in expected], atol=1e-3)
    assert company == plain[:5]


@NEEDS_INVARIANCE
def test_a_beam_under_a_grammar_goes_on_from_the_token_it_is_told(engine):
    """Told, or joining with it: the same candidates, all of them allowed after it."""
    options = Options(prompt=PROMPT[:9], grammar=True, num_candidates=4)
    told, other = row_of(0, options), row_of(1, replace(options, output=[5]))
    engine.execute(step(add=[told]))
    result = candidates_by_row(engine.execute(step(add=[other], change=[Change(0, 1, told=[5])])))
    assert result[0] == result[1]
    assert all(toy_allows([5], token) for token, _ in result[0])


# --- log probabilities of prompts ------------------------------------------------------------------------------------


def prompt_logprobs(results: Sequence[worker_pb2.WorkerOutputs], row: int) -> tuple[list[float], list[int]]:
    """Log probabilities and likeliest ids of all places, which must follow each other from place 1 on."""
    logprobs: list[float] = []
    ids: list[int] = []
    for found in (p for result in results for p in result.prompt_logprobs if p.row == row):
        assert found.start == len(logprobs) + 1
        logprobs += wire_arrays.unpack(found.logprobs, "logprobs", F32).tolist()
        ids += wire_arrays.unpack(found.top_token_ids, "ids").tolist()
        assert len(ids) == len(logprobs) * found.num_top
    return logprobs, ids


@pytest.mark.parametrize("num_bytes", [2**26, 4 * 512 * 5], ids=["one piece", "pieces"])
@pytest.mark.parametrize("chunks", [[len(PROMPT)], [1, 20, len(PROMPT) - 21]], ids=["whole", "chunks"])
@NEEDS_INVARIANCE
def test_prompt_log_probabilities_equal_the_reference(engine, reference, monkeypatch, num_bytes, chunks):
    """In pieces of any size, in chunks, beside others; the tokens of all rows stay as they are without."""
    monkeypatch.setattr(prompt_scores, "_MOST_LOGIT_BYTES", num_bytes)
    plain = tokens_by_row(engine.execute(step(add=[join(0), join(1)], num_decode_steps=3)))
    engine.reset()
    options = rare(common_pb2.ResolvedSampling(num_prompt_logprobs=3))
    other = rare(common_pb2.ResolvedSampling(num_prompt_logprobs=0))
    first = [join(0, logprobs=True), join(1, chunks[0], options=options), join(2, 9, tokens=PROMPT[:9], options=other)]
    results = [engine.execute(step(add=first))]
    results += [engine.execute(step(change=[Change(1, chunk), Change(2, 0)])) for chunk in chunks[1:]]
    results += [engine.execute(step(change=[Change(2, 0)] if len(chunks) == 1 else [])) for _ in range(2)]
    with torch.inference_mode():
        expected = torch.log_softmax(reference(torch.tensor([PROMPT])).logits[0, :-1], -1)
    logprobs, ids = prompt_logprobs(results, 1)
    targets = torch.tensor(PROMPT[1:])
    np.testing.assert_allclose(logprobs, expected.gather(1, targets[:, None])[:, 0].numpy(), atol=1e-3)
    assert ids == expected.topk(3, dim=-1).indices.flatten().tolist()
    short, none = prompt_logprobs(results, 2)
    assert (short, none) == (logprobs[:8], [])
    assert [token for result in results for token in tokens_by_row(result).get(1, [])] == plain[1]
    assert [token for result in results for token in tokens_by_row(result).get(0, [])][:3] == plain[0]


def test_prompt_log_probabilities_without_likeliest_tokens(engine):
    """0 of them: the tokens' own alone."""
    options = rare(common_pb2.ResolvedSampling(num_prompt_logprobs=0))
    (found,) = engine.execute(step(add=[join(0, options=options)])).prompt_logprobs
    assert (found.start, found.num_top, found.top_token_ids) == (1, 0, b"")
    assert len(found.logprobs) == 4 * (len(PROMPT) - 1)


def test_a_prompt_that_is_not_finite_fails_alone(engine):
    """NaN at a prompt place in the middle of a chunked prefill: flagged at once, no token and no log probability of it."""
    options = rare(common_pb2.ResolvedSampling(num_prompt_logprobs=1))
    plain = tokens_by_row(engine.execute(step(add=[join(0)], num_decode_steps=3)))[0]
    engine.reset()
    engine.execute(step(add=[join(0), join(1, 8, options=options), join(2, 8, options=options)]))
    engine.cache.device_pool[:, :, ROOM] = float("nan")
    result = engine.execute(step(change=[Change(1, 8), Change(2, 8)]))
    assert flags_of(result) == {0: 0, 1: worker_pb2.ROW_FLAG_NOT_FINITE}
    assert [found.row for found in result.prompt_logprobs] == [2]
    result = engine.execute(step(change=[Change(1, 8), Change(2, len(PROMPT) - 16)]))
    assert set(tokens_by_row(result)) == {0, 2}
    assert tokens_by_row(result)[0] == [plain[2]]
    engine.cache.device_pool.zero_()


# --- vectors, and everything together --------------------------------------------------------------------------------


def vectors(results: Sequence[worker_pb2.WorkerOutputs]) -> dict[int, np.ndarray]:
    return {
        found.row: wire_arrays.unpack(found.values, "values", F32) for result in results for found in result.embeddings
    }


@NEEDS_INVARIANCE
def test_one_batch_of_everything(engine, reference):
    """Vectors, prompts scored, a beam, children, a grammar, drafts and plain rows: each as it is alone."""
    mean, last = (rare(task=task) for task in (common_pb2.TASK_EMBED_MEAN, common_pb2.TASK_EMBED_LAST))
    rows = [
        join(0),
        join(1, 20, options=mean),
        join(2, options=last, tokens=PROMPT[:11]),
        join(3, options=rare(num_candidates=4)),
        join(4, options=rare(num_children=2), temperature=1.0, seed=3),
        row_of(5, Options(prompt=PROMPT[:9], grammar=True, seed=1)),
        join(6, options=rare(common_pb2.ResolvedSampling(num_prompt_logprobs=2)), logprobs=True),
    ]
    results = [engine.execute(step(add=rows))]
    known = [row for row in (0, 4, 5, 6) if row in tokens_by_row(results[0])]
    drafts = [Change(row, 3, num_drafts=2) for row in known]
    results.append(engine.execute(step(change=[*drafts, Change(1, len(PROMPT) - 20)])))
    results.append(engine.execute(step()))
    found: dict[int, list[int]] = {}
    for result in results:
        for row, tokens in tokens_by_row(result).items():
            found.setdefault(row, []).extend(tokens)
    assert set(found) == {0, 4, 5, 6}
    for row in rows:
        engine.reset()
        alone = [engine.execute(step(add=[replace(row, num_tokens=len(row.tokens))]))]
        alone += [engine.execute(step()) for _ in range(6)]
        own = [token for result in alone for token in tokens_by_row(result).get(row.row, [])]
        assert found.get(row.row, []) == own[: len(found.get(row.row, []))]
        assert candidates_by_row(results[0]).get(row.row) == candidates_by_row(alone[0]).get(row.row)
        for index, vector in vectors(alone).items():
            assert vectors(results)[index].tolist() == vector.tolist()
    with torch.inference_mode():
        states = reference.model(torch.tensor([PROMPT])).last_hidden_state[0]
    np.testing.assert_allclose(vectors(results)[1], states.mean(0).numpy(), atol=1e-3)
    np.testing.assert_allclose(vectors(results)[2], states[10].numpy(), atol=1e-3)


def test_a_vector_that_is_not_finite_fails_alone(engine):
    options = rare(task=common_pb2.TASK_EMBED_MEAN)
    engine.execute(step(add=[join(0, 40, options=options), join(1, 40, options=options)]))
    engine.cache.device_pool[:, :, 0] = float("nan")
    result = engine.execute(step(change=[Change(0, len(PROMPT) - 40), Change(1, len(PROMPT) - 40)]))
    assert flags_of(result) == {0: worker_pb2.ROW_FLAG_NOT_FINITE}
    assert set(vectors([result])) == {1}
    engine.cache.device_pool.zero_()


def test_tasks_that_cannot_be_done_are_refused(engine):
    """By name: a mean over tokens that are computed already, and any task of a model that does not show its states."""
    options = rare(task=common_pb2.TASK_EMBED_MEAN)
    with pytest.raises(InvalidArgument, match="must start at the first token"):
        engine.execute(step(add=[join(0, 8, options=options, num_computed=8)]))
    engine._rows.guard(_task_guard(0))
    with pytest.raises(InvalidArgument, match="not supported by this model") as caught:
        engine.execute(step(add=[join(0, options=options)]))
    assert [v.field for v in caught.value.violations] == ["added.options.task"]
    engine._rows._guards.pop()


def test_a_grammar_that_allows_nothing_fails_its_row_alone(engine):
    equip(engine, NgramProposer())
    engine._runner = StepRunner(
        engine._loaded.model,
        engine.cache,
        engine._rows,
        engine.row_rule,
        queue=engine._loaded.device.queue(),
        masks=ToyMasks(refused=[1]),
    )
    rows = [row_of(i, Options(prompt=PROMPT[:9], output=[4], grammar=True, seed=i)) for i in range(3)]
    result = engine.execute(step(add=rows))
    assert flags_of(result) == {0: 0, 1: worker_pb2.ROW_FLAG_GRAMMAR, 2: 0}
    assert tokens_by_row(result)[1] == []
    assert set(tokens_by_row(engine.execute(step()))) == {0, 2}
    engine.execute(step(remove=[1]))
