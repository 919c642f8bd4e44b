"""Split the scheduler's token columns, which hold many requests, into runs of one choice each. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from protos.engine.v1 import engine_pb2
from protos.inference.v1 import inference_pb2
from svc_common import wire_arrays


@dataclass(slots=True)
class ChoiceTokens:
    """Consecutive tokens of one choice from `token_offset` on. `logprobs`, `tops`: one per token, or empty."""

    token_offset: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tops: list[inference_pb2.TopLogprobs] = field(default_factory=list)

    def without_first(self, num_tokens: int) -> "ChoiceTokens":
        """Return the run without its first `num_tokens`."""
        return ChoiceTokens(
            self.token_offset + num_tokens,
            self.token_ids[num_tokens:],
            self.logprobs[num_tokens:],
            self.tops[num_tokens:],
        )

    def extend(self, other: "ChoiceTokens") -> None:
        """Append the run that follows this one."""
        self.token_ids += other.token_ids
        self.logprobs += other.logprobs
        self.tops += other.tops


def read_runs(tokens: engine_pb2.TokenColumns) -> list[tuple[int, int, ChoiceTokens]]:
    """All (handle, choice, run) in order. Raises InvalidArgument if the columns' lengths do not match."""
    columns = {
        "tokens.handles": tokens.handles,
        "tokens.choices": tokens.choices,
        "tokens.token_offsets": tokens.token_offsets,
        "tokens.counts": tokens.counts,
    }
    handles, choices, offsets, counts = wire_arrays.unpack_all(columns, wire_arrays.U32).tolist()
    total = sum(counts)
    token_ids = wire_arrays.unpack(tokens.token_ids, "tokens.token_ids", minimum=0, length=total).tolist()
    logprobs = _read_logprobs(tokens, total) if tokens.logprobs else []
    tops = _read_tops(tokens, total) if tokens.top_counts else []
    runs, begin = [], 0
    for handle, choice, offset, count in zip(handles, choices, offsets, counts, strict=True):
        end = begin + count
        run = ChoiceTokens(offset, token_ids[begin:end], logprobs[begin:end], tops[begin:end])
        runs.append((handle, choice, run))
        begin = end
    return runs


def _read_logprobs(tokens: engine_pb2.TokenColumns, total: int) -> list[float]:
    read: list[float] = wire_arrays.unpack(tokens.logprobs, "tokens.logprobs", wire_arrays.F32, length=total).tolist()
    return read


def _read_tops(tokens: engine_pb2.TokenColumns, total: int) -> list[inference_pb2.TopLogprobs]:
    counts = wire_arrays.unpack(tokens.top_counts, "tokens.top_counts", wire_arrays.U32, length=total)
    length = int(counts.sum())
    ids = wire_arrays.unpack(tokens.top_token_ids, "tokens.top_token_ids", minimum=0, length=length)
    values = wire_arrays.unpack(tokens.top_logprobs, "tokens.top_logprobs", wire_arrays.F32, length=length)
    return _tops(ids.tolist(), values.tolist(), counts.tolist())


def _tops(ids: list[int], values: list[float], counts: Sequence[int]) -> list[inference_pb2.TopLogprobs]:
    made: list[inference_pb2.TopLogprobs] = []
    begin = 0
    for count in counts:
        end = begin + count
        made.append(inference_pb2.TopLogprobs(token_ids=ids[begin:end], logprobs=values[begin:end]))
        begin = end
    return made


def committed_message(choice: int, token_ids: bytes, beside: ChoiceTokens) -> engine_pb2.CommittedTokens:
    """Build the message of a choice's received tokens; `beside` has one entry per token, or none."""
    pairs = [pair for top in beside.tops for pair in zip(top.token_ids, top.logprobs, strict=True)]
    return engine_pb2.CommittedTokens(
        choice=choice,
        token_ids=token_ids,
        logprobs=wire_arrays.pack(beside.logprobs, wire_arrays.F32),
        top_counts=wire_arrays.pack([len(top.token_ids) for top in beside.tops], wire_arrays.U32) if pairs else b"",
        top_token_ids=wire_arrays.pack([token_id for token_id, _ in pairs]),
        top_logprobs=wire_arrays.pack([logprob for _, logprob in pairs], wire_arrays.F32),
    )


def public_prompt_logprobs(message: engine_pb2.PromptLogprobs, prompt: bytes) -> inference_pb2.PromptLogprobs:
    """Convert to the public message; `prompt`: int32 token ids.

    Raises InvalidArgument if the columns do not match the prompt's length.
    """
    token_ids = wire_arrays.unpack(prompt, "token_ids")[1:]
    length, num_top = len(token_ids), message.num_top
    logprobs = wire_arrays.unpack(message.logprobs, "prompt_logprobs.logprobs", wire_arrays.F32, length=length)
    num = length * num_top
    ids = wire_arrays.unpack(message.top_token_ids, "prompt_logprobs.top_token_ids", minimum=0, length=num)
    values = wire_arrays.unpack(message.top_logprobs, "prompt_logprobs.top_logprobs", wire_arrays.F32, length=num)
    return inference_pb2.PromptLogprobs(
        start_index=1,
        token_ids=token_ids.tolist(),
        logprobs=logprobs.tolist(),
        top_logprobs=_tops(ids.tolist(), values.tolist(), [num_top] * length if num_top else []),
    )
