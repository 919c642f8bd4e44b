"""Tokens under other names: a one-to-one map that nothing else of a recording depends on, and that hides them."""

import zlib

import numpy as np

from block_manager.hashing import HashChain, little_endian
from scheduler_svc.core.composition import presets
from scheduler_svc.core.limits import CoreLimits
from scheduler_svc.core.plan import StepResult
from scheduler_svc.core.request import Request
from scheduler_svc.core.request_rules import StopRules
from scheduler_svc.observe.recording import codec
from scheduler_svc.observe.recording.inputs import token_ids, tokens
from scheduler_svc.observe.recording.recorder import RecordingCore
from scheduler_svc.observe.recording.replay import replay
from scheduler_svc.observe.recording.segment_buffer import SegmentBuffer
from scheduler_svc.observe.recording.token_alias import TokenAlias

PROMPT = [1_234_567 + 97 * i for i in range(40)]
MOST = 2**31 - 1


def test_different_tokens_stay_different() -> None:
    """A vocabulary and the corners of 31 bits: no two under one name, none beyond 31 bits, those that mean nothing as they are."""
    ids = [*range(200_000), *range(MOST - 1_000, MOST + 1)]
    named = token_ids(TokenAlias(b"key").tokens(tokens(ids)))
    assert len(set(named)) == len(ids)
    assert min(named) >= 0
    assert token_ids(TokenAlias(b"key").tokens(tokens([-1, 5, -1])))[::2] == [-1, -1]


def test_the_key_decides() -> None:
    """Equal keys give equal names, others others; drawn ones are all different."""
    ids = tokens(range(1_000))
    assert TokenAlias(b"key").tokens(ids) == TokenAlias(b"key").tokens(ids)
    assert TokenAlias(b"key").tokens(ids) != TokenAlias(b"kez").tokens(ids)
    assert TokenAlias.drawn().tokens(ids) != TokenAlias.drawn().tokens(ids)
    assert (TokenAlias(b"key").salt("tenant"), TokenAlias(b"key").salt("")) != ("tenant", "tenant")
    assert TokenAlias(b"key").salt("") == ""


def test_names_look_like_nothing() -> None:
    """Neighbours end up far apart: of the 31 bits about half differ."""
    named = np.frombuffer(TokenAlias(b"key").tokens(tokens(range(4_096))), np.int32)
    flipped = np.bitwise_count(named[1:] ^ named[:-1])
    assert 14 < flipped.mean() < 17


def test_hashes_are_of_the_names() -> None:
    """R107, R138: a chain with other names hashes what a recording shows, block by block and at once."""
    alias = TokenAlias(b"key")
    named = token_ids(alias.tokens(tokens(PROMPT)))
    plain = HashChain(8, "0:" + alias.salt("tenant")).upto(named, 5)
    assert HashChain(8, "0:" + alias.salt("tenant"), alias).upto(PROMPT, 5) == plain
    stepwise = HashChain(8, "0:" + alias.salt("tenant"))
    assert [stepwise.block(i, alias.tokens(little_endian(PROMPT[8 * i : 8 * i + 8]))) for i in range(5)] == plain


def _life(alias: TokenAlias | None) -> tuple[bytes, list[int]]:
    """The bytes of a recording with a prompt, an output and a stop id of which none is common, and all these."""
    limits = CoreLimits(4, 65, 64, max_num_seqs=4, max_num_batched_tokens=64)
    buffer = SegmentBuffer(2, 2**30)
    core = RecordingCore(presets.build("vllm-v1", limits, rename=alias), buffer, lambda: 0.0)
    stop = StopRules(20, eos_token_ids=frozenset([7_654_321]), stop_token_ids=frozenset([7_654_987]))
    core.add(Request("r0", PROMPT, stop, 0.0, cache_salt="a palimpsest", committed=[3_456_789]))
    outputs = [5_432_100 + 11 * i for i in range(6)]
    for i, token in enumerate(outputs):
        [plan] = core.schedule(float(i))
        core.update(StepResult(plan.step, {"r0/0": [token]}))
    core.put_drafts({"r0/0": [2_345_678]})
    segments = list(buffer.segments())
    data = b"".join(codec.encode(segment, alias) for segment in segments)
    assert replay([codec.decode(codec.encode(segment, alias)) for segment in segments]).identical
    return data, [*PROMPT, 7_654_321, 7_654_987, 3_456_789, 2_345_678, *outputs]


def _shown(data: bytes, secrets: list[int]) -> int:
    """How many of them are in the bytes, as numbers or as text. Little-endian int32 stand at any offset."""
    return sum(little_endian([token]) in data or str(token).encode() in data for token in secrets)


def test_no_token_is_in_a_recording() -> None:
    """Prompts, outputs, stop ids, guesses, salts: none of them, however it is written."""
    data, secrets = _life(TokenAlias.drawn())
    assert len(secrets) == 50
    assert _shown(data, secrets) == 0
    assert b"palimpsest" not in data
    assert b"palimpsest" not in zlib.compress(data)


def test_tokens_are_there_where_wanted() -> None:
    """Verbatim recordings have them all: the test above looks in the right way."""
    data, secrets = _life(None)
    assert _shown(data, secrets) == len(secrets)
    assert b"a palimpsest" in data
