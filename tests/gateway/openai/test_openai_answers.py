"""Events as OpenAI's JSON: the chunks are read back by the official package's own accumulator. Pure."""

from typing import Any

import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from gateway_svc.openai.answers.answer import HttpAnswer
from gateway_svc.openai.answers.answer_options import AnswerOptions
from gateway_svc.openai.answers.outputs import Prompt
from gateway_svc.openai.answers.shapes import ChatShape, CompletionShape
from protos.common.v1 import common_pb2
from protos.inference.v1 import inference_pb2 as pb
from tests.support.services.models import tiny

HEAD = {"id": "x-1", "created": 5, "model": "tiny", "system_fingerprint": "f"}
PROMPT = tiny().encode("once upon")


def answer(
    shape: Any = None, options: AnswerOptions | None = None, *, num_choices: int = 1, **prompt: Any
) -> HttpAnswer:
    prompts = [Prompt(len(PROMPT), PROMPT, **prompt)]
    return HttpAnswer(shape or ChatShape(), HEAD, tiny(), prompts, options or AnswerOptions(), num_choices=num_choices)


def finished(reason: int, choice: int = 0) -> pb.Finished:
    return pb.Finished(choice=choice, reason=reason)


def usage(num_tokens: int) -> pb.Usage:
    return pb.Usage(prompt_tokens=len(PROMPT), completion_tokens=num_tokens, cached_prompt_tokens=2, reasoning_tokens=1)


TOOLS = [
    pb.Started(),
    pb.ReasoningDelta(text="hm", token_ids=[5]),
    pb.Delta(text="Let me see.", token_ids=[6, 7], token_offset=1),
    pb.Delta(token_ids=[8], token_offset=3),
    pb.ToolCallDelta(index=0, id="call_a", name="weather", arguments="", token_ids=[9], token_offset=4),
    pb.ToolCallDelta(index=0, arguments='{"city":', token_ids=[10], token_offset=5),
    pb.ToolCallDelta(index=0, arguments='"Rome"}', token_ids=[11], token_offset=6),
    pb.ToolCallDelta(index=1, id="call_b", name="time", arguments="{}", token_ids=[12], token_offset=7),
    finished(common_pb2.FINISH_REASON_TOOL_CALLS),
    usage(8),
]


def accumulated(chunks: list[dict[str, Any]]) -> ChatCompletion:
    """What the official package makes of a stream."""
    state = ChatCompletionStreamState()
    for chunk in chunks:
        state.handle_chunk(ChatCompletionChunk.model_validate(chunk))
    return state.get_final_completion()


def test_tool_calls_chunk_by_chunk() -> None:
    """Role first; of each call one chunk with id, type and name, then arguments alone; marks are no chunk, and the end
    is told with what was made last."""
    chunks = answer().chunks(0, TOOLS)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas == [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "hm", "reasoning": "hm"},
        {"content": "Let me see."},
        {
            "tool_calls": [
                {"index": 0, "id": "call_a", "type": "function", "function": {"name": "weather", "arguments": ""}}
            ]
        },
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"city":'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '"Rome"}'}}]},
        {
            "tool_calls": [
                {"index": 1, "id": "call_b", "type": "function", "function": {"name": "time", "arguments": "{}"}}
            ]
        },
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 6 + ["tool_calls"]
    assert all("usage" not in chunk and chunk["object"] == "chat.completion.chunk" for chunk in chunks)


def test_a_stream_adds_up_to_the_whole() -> None:
    """The package's accumulator makes of the chunks what is in the whole answer."""
    whole = answer()
    whole.add(0, TOOLS)
    made = ChatCompletion.model_validate(whole.whole())
    streamed = accumulated(answer().chunks(0, TOOLS))
    message, other = made.choices[0].message, streamed.choices[0].message
    assert (message.content, message.reasoning, message.reasoning_content) == ("Let me see.", "hm", "hm")
    assert other.content == message.content
    calls = [(call.id, call.function.name, call.function.arguments) for call in message.tool_calls]
    assert calls == [("call_a", "weather", '{"city":"Rome"}'), ("call_b", "time", "{}")]
    assert [(call.id, call.function.name, call.function.arguments) for call in other.tool_calls] == calls
    assert made.choices[0].finish_reason == streamed.choices[0].finish_reason == "tool_calls"
    assert made.usage.completion_tokens_details.reasoning_tokens == 1
    assert made.usage.prompt_tokens_details.cached_tokens == 2


def test_calls_alone_have_no_content() -> None:
    """null, as OpenAI has it; without calls an empty text stays a text."""
    for events, content in ((TOOLS[4:], None), ([finished(common_pb2.FINISH_REASON_STOP), usage(0)], "")):
        made = answer()
        made.add(0, events)
        assert made.whole()["choices"][0]["message"]["content"] == content


def test_reasoning_can_be_left_out() -> None:
    """include_reasoning=false: its tokens count, its text is not told."""
    options = AnswerOptions(reasoning=False, usage_last=True)
    streamed, whole = answer(options=options), answer(options=options)
    chunks = streamed.chunks(0, TOOLS) + streamed.last_chunks()
    assert not any("reasoning" in chunk["choices"][0]["delta"] for chunk in chunks[:-1])
    assert chunks[-1]["usage"]["completion_tokens"] == 8
    whole.add(0, TOOLS)
    assert "reasoning" not in whole.whole()["choices"][0]["message"]


def test_nothing_is_said_before_the_first_output() -> None:
    """Until then an error still has its HTTP status; each choice opens by itself."""
    made = answer(num_choices=2)
    assert made.chunks(0, [pb.Started()]) == []
    chunks = made.chunks(0, [pb.Delta(choice=1, text="a", token_ids=[5]), finished(common_pb2.FINISH_REASON_STOP, 0)])
    found = [(chunk["choices"][0]["index"], chunk["choices"][0]["delta"].get("role")) for chunk in chunks]
    assert found == [(1, "assistant"), (1, None), (0, "assistant"), (0, None)]


def test_usage_in_streams() -> None:
    """Asked for: null until the last chunk, which has no choices; vLLM's continuous_usage_stats: so far in every chunk."""
    events = [pb.Delta(text="a", token_ids=[5]), pb.Delta(text="b", token_ids=[6, 7]), TOOLS[8], usage(3)]
    made = answer(options=AnswerOptions(usage_last=True))
    chunks = made.chunks(0, events[:3]) + made.chunks(0, events[3:]) + made.last_chunks()
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * 3
    assert (chunks[-1]["choices"], chunks[-1]["usage"]["total_tokens"]) == ([], 3 + len(PROMPT))
    made = answer(options=AnswerOptions(usage_last=True, usage_always=True))
    counts = [chunk["usage"]["completion_tokens"] for event in events for chunk in made.chunks(0, [event])]
    assert counts == [0, 1, 3, 3]


@pytest.mark.parametrize(
    ("reason", "word"),
    [
        (common_pb2.FINISH_REASON_STOP, "stop"),
        (common_pb2.FINISH_REASON_LENGTH, "length"),
        (common_pb2.FINISH_REASON_TOOL_CALLS, "tool_calls"),
        (common_pb2.FINISH_REASON_DEADLINE, "deadline"),
    ],
)
def test_finish_reasons(reason: int, word: str) -> None:
    """A deadline never looks like an end or a limit (never report a deadline as LENGTH)."""
    (*_, last) = answer().chunks(0, [finished(reason)])
    assert last["choices"][0]["finish_reason"] == word


# --- log probabilities and echo --------------------------------------------------------------------------------------

TOP = [pb.TopLogprobs(token_ids=[80], logprobs=[-0.5])]
ECHOED = [
    pb.Started(),
    pb.Delta(text=tiny().decode([70]), token_ids=[70], logprobs=[-2.0], top_logprobs=TOP),
    pb.PromptLogprobs(
        start_index=1, token_ids=PROMPT[1:], logprobs=[-1.0] * len(PROMPT[1:]), top_logprobs=TOP * len(PROMPT[1:])
    ),
    finished(common_pb2.FINISH_REASON_LENGTH),
    usage(1),
]
ECHO = AnswerOptions(echo=True, echo_logprobs=True)


def test_echo_with_log_probabilities_as_lm_eval_reads_them() -> None:
    """tokens, token_logprobs, top_logprobs and text_offset of prompt and output in a row; nothing for the first token."""
    made = answer(CompletionShape(), ECHO, text="once upon", awaits_logprobs=True)
    made.add(0, ECHOED)
    choice = Completion.construct(**made.whole()).choices[0]  # as the package does: the real API sends null too
    found = choice.logprobs
    assert choice.text == "once upon" + tiny().decode([70])
    assert "".join(found.tokens) == choice.text
    assert found.token_logprobs == [None, *[-1.0] * len(PROMPT[1:]), -2.0]
    assert found.top_logprobs[0] is None
    assert max(found.top_logprobs[1].values()) == -0.5
    ends = [*found.text_offset[1:], len(choice.text)]
    pieces = [choice.text[begin:end] for begin, end in zip(found.text_offset, ends, strict=True)]
    assert pieces == found.tokens
    assert found.text_offset[-1] == len("once upon")


def test_an_echo_comes_first_in_a_stream() -> None:
    """Output that is faster than the prompt's log probabilities waits for them; the pieces add up to the whole."""
    made = answer(CompletionShape(), ECHO, text="once upon", awaits_logprobs=True)
    assert made.chunks(0, ECHOED[:2]) == []
    chunks = made.chunks(0, ECHOED[2:])
    whole = answer(CompletionShape(), ECHO, text="once upon", awaits_logprobs=True)
    whole.add(0, ECHOED)
    expected = whole.whole()["choices"][0]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == expected["text"]
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks if chunk["choices"][0]["logprobs"]]
    for name, values in expected["logprobs"].items():
        assert [value for part in parts for value in part[name]] == values


def test_an_echo_alone() -> None:
    """max_tokens 0: the token that was made for it is nowhere to be seen."""
    options = AnswerOptions(echo=True, echo_logprobs=True, only_echo=True, usage_last=True)
    made = answer(CompletionShape(), options, text="once upon", awaits_logprobs=True)
    made.add(0, ECHOED)
    whole = made.whole()
    assert (whole["choices"][0]["text"], whole["usage"]["completion_tokens"]) == ("once upon", 0)
    assert len(whole["choices"][0]["logprobs"]["tokens"]) == len(PROMPT)
    streamed = answer(CompletionShape(), options, text="once upon", awaits_logprobs=True)
    chunks = streamed.chunks(0, ECHOED)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "once upon"


def test_token_ids_of_vllm() -> None:
    """return_token_ids and return_tokens_as_token_ids, whole and streamed."""
    options = AnswerOptions(token_ids=True, tokens_as_ids=True)
    events = [pb.Delta(text="ab", token_ids=[70, 71], logprobs=[-1, -2]), TOOLS[8], usage(2)]
    for shape in (CompletionShape(), ChatShape()):
        whole = answer(shape, options)
        whole.add(0, events)
        choice = whole.whole()["choices"][0]
        assert choice["token_ids"] == [70, 71]
        where = choice if isinstance(shape, CompletionShape) else whole.whole()
        assert where["prompt_token_ids"] == PROMPT
        logprobs = choice["logprobs"]
        names = logprobs.get("tokens") or [entry["token"] for entry in logprobs["content"]]
        assert names == ["token_id:70", "token_id:71"]
        chunks = answer(shape, options).chunks(0, events)
        first = chunks[0]["choices"][0] if isinstance(shape, CompletionShape) else chunks[0]
        assert first["prompt_token_ids"] == PROMPT
        assert [i for chunk in chunks for i in chunk["choices"][0].get("token_ids", [])] == [70, 71]


def test_marks_have_no_log_probabilities_in_a_chat() -> None:
    """Tokens that only mark where a call begins are no content; the entries spell the content."""
    made = answer()
    made.add(
        0, [pb.Delta(text=tiny().decode([70]), token_ids=[70], logprobs=[-1]), pb.Delta(token_ids=[0], logprobs=[-2])]
    )
    choice = made.whole()["choices"][0]
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == [choice["message"]["content"]]


def test_tokens_that_are_no_text_are_told_apart() -> None:
    """Halves of a character have equal names as text; OpenAI names them by their bytes."""
    halves = [next(i for i in range(300) if tiny().token_bytes(i) == bytes([byte])) for byte in (0xE2, 0x82)]
    made = answer(CompletionShape())
    made.add(0, [pb.Delta(text="", token_ids=halves, logprobs=[-1, -2]), TOOLS[8], usage(2)])
    assert made.whole()["choices"][0]["logprobs"]["tokens"] == ["bytes:\\xe2", "bytes:\\x82"]
