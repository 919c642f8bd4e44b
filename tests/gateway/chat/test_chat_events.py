"""Tokens of a chat become typed deltas, each token in one, however updates are coalesced (inference.proto, GenerateEvent)."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway_svc.chat.parsing import ChatParsing
from gateway_svc.chat.tool_calls.tool_formats import TOOL_FORMATS
from gateway_svc.generating.choice_events import AnyDelta, ChoiceEvents
from gateway_svc.requests.request_update import ChoiceUpdate
from gateway_svc.requests.token_runs import ChoiceTokens
from gateway_svc.text.text_model import TextModel
from gateway_svc.text.text_stream import TextStream
from protos.common.v1 import common_pb2
from protos.engine.v1 import engine_pb2
from protos.inference.v1 import inference_pb2 as pb
from tests.support.services import models
from tests.support.services.chat_outputs import Parts, parsing

EOS = 0
HERMES = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich 😀"}}\n</tool_call>'
TALK = f"<think>\nHm 😀\n</think>\n\nI look.\n{HERMES}\n{HERMES.replace('get_weather', 'add')}"


@dataclass
class Heard:
    """What a reader has of one choice."""

    parts: Parts = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    finished: pb.Finished | None = None

    def take(self, event: AnyDelta | pb.Finished) -> None:
        if isinstance(event, pb.Finished):
            self.finished = event
            return
        assert event.token_offset == len(self.token_ids)
        self.token_ids += event.token_ids
        self.logprobs += event.logprobs
        self.kinds += [type(event).__name__] * len(event.token_ids)
        self._add(event)

    def _add(self, event: AnyDelta) -> None:
        if isinstance(event, pb.ToolCallDelta):
            if event.id:
                self.parts.append(("call", f"{event.index}:{event.name}", ""))
            kind, name, text = "call", self.parts[-1][1], event.arguments
            assert name.startswith(f"{event.index}:")
        else:
            kind, name, text = ("reasoning" if isinstance(event, pb.ReasoningDelta) else "content"), "", event.text
        if self.parts and self.parts[-1][:2] == (kind, name):
            self.parts[-1] = (kind, name, self.parts[-1][2] + text)
        elif text:
            self.parts.append((kind, name, text))


def hear(
    ids: Sequence[int],
    batches: Sequence[int] = (),
    *,
    how: ChatParsing | None = None,
    model: TextModel | None = None,
    stops: Sequence[str] = (),
    reason: int = common_pb2.FINISH_REASON_STOP,
    heard: Heard | None = None,
) -> tuple[Heard, ChoiceEvents, list[int]]:
    """Reads an output whose last token ended it, in batches: what was heard, where deltas ended. `heard`: goes on from there."""
    heard = heard or Heard()
    how = how or parsing("hermes", reasoning="think")
    text = TextStream(model or models.tiny(), stops, parser=how.parser())
    choice = ChoiceEvents(0, text, with_logprobs=True, num_delivered=len(heard.token_ids))
    boundaries: list[int] = []
    for event in fed(choice, ids, batches, reason):
        heard.take(event)
        boundaries.append(len(heard.token_ids))
    return heard, choice, boundaries


def events_of(
    ids: Sequence[int],
    batches: Sequence[int],
    *,
    how: ChatParsing,
    model: TextModel,
    stops: Sequence[str],
    reason: int,
    delivered: int,
) -> Iterator[AnyDelta | pb.Finished]:
    """The events for a reader that has `delivered` tokens."""
    text = TextStream(model, stops, parser=how.parser())
    yield from fed(ChoiceEvents(0, text, with_logprobs=True, num_delivered=delivered), ids, batches, reason)


def fed(
    choice: ChoiceEvents, ids: Sequence[int], batches: Sequence[int], reason: int
) -> Iterator[AnyDelta | pb.Finished]:
    """Events of an output that comes in batches, to its end."""
    edges = [0, *sorted(min(b, len(ids)) for b in batches), len(ids)]
    for a, b in itertools.pairwise(edges):
        end = engine_pb2.Finished(reason=reason, num_output_tokens=len(ids)) if b == len(ids) else None
        if end is not None and reason == common_pb2.FINISH_REASON_STOP:
            end.stop_token_id = ids[-1]
        run = ChoiceTokens(a, list(ids[a:b]), [float(i) for i in range(a, b)])
        yield from choice.take(ChoiceUpdate(run, finished=end))
        if end is not None:
            return


def encoded(text: str) -> list[int]:
    return [*models.tiny().encode(text), EOS]


ARGUMENTS = '{"city": "Zürich 😀"}'
EXPECTED = [
    ("reasoning", "", "Hm 😀"),
    ("content", "", "I look."),
    ("call", "0:get_weather", ARGUMENTS),
    ("call", "1:add", ARGUMENTS),
]


def test_every_token_is_in_one_delta_whatever_the_batches() -> None:
    """Parts, tokens, log probabilities, the kind that each token is in, and the end are those of one batch."""
    ids = encoded(TALK)
    whole, choice, _ = hear(ids)
    assert whole.parts == EXPECTED
    assert whole.token_ids == ids
    assert whole.logprobs == [float(i) for i in range(len(ids))]
    assert whole.finished == pb.Finished(reason=common_pb2.FINISH_REASON_TOOL_CALLS)
    assert choice.num_output_tokens == len(ids)
    assert 0 < choice.num_reasoning_tokens == whole.kinds.count("ReasoningDelta") < 20
    for size in (1, 2, 3, 7):
        again, other, _ = hear(ids, range(0, len(ids), size))
        assert again == whole
        assert other.num_reasoning_tokens == choice.num_reasoning_tokens


def test_arguments_stream() -> None:
    """They come before their call is complete, in several pieces."""
    ids = encoded(HERMES)
    heard, _, boundaries = hear(ids[:-6], range(len(ids)), reason=common_pb2.FINISH_REASON_LENGTH)
    assert heard.parts[0][:2] == ("call", "0:get_weather")
    assert len(set(boundaries)) > 5
    assert heard.finished is not None
    assert heard.finished.reason == common_pb2.FINISH_REASON_LENGTH


TAGGED = (
    '<think>Hm 😀</think>I look.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nZürich\n"😀"\n</parameter>\n'
    "<parameter=days>\n[1, 2, 30]\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=add>\n</function>\n"
    "</tool_call>"
)


def test_parameters_in_tags_become_json() -> None:
    """Each token is in one delta, and the deltas of the arguments are JSON together."""
    how = dataclasses.replace(
        parsing("qwen3-coder", reasoning="think"), tool_types={"get_weather": {"city": ["string"], "days": ["array"]}}
    )
    ids = encoded(TAGGED)
    for batches in ((), range(len(ids)), range(0, len(ids), 3)):
        heard, _, _ = hear(ids, batches, how=how)
        assert heard.parts == [
            ("reasoning", "", "Hm 😀"),
            ("content", "", "I look."),
            ("call", "0:get_weather", '{"city": "Zürich\\n\\"😀\\"", "days": [1, 2, 30]}'),
            ("call", "1:add", "{}"),
        ]
        assert heard.token_ids == ids


@pytest.mark.parametrize(("name", "talk"), [("hermes", TALK), ("qwen3-coder", TAGGED)])
def test_reading_on_at_every_boundary(name: str, talk: str) -> None:
    """The rest has each remaining token once and the same ids of calls; state and end are as if all had been told."""
    ids, how = encoded(talk), parsing(name, reasoning="think")
    whole, first, boundaries = hear(ids, range(len(ids)), how=how)
    for place in sorted(set(boundaries)):
        heard = Heard()
        text = TextStream(models.tiny(), parser=how.parser())
        choice = ChoiceEvents(0, text, with_logprobs=True)
        for i, token_id in enumerate(ids):
            if len(heard.token_ids) >= place:
                break
            for event in choice.take(ChoiceUpdate(ChoiceTokens(i, [token_id], [float(i)]))):
                heard.take(event)
        assert len(heard.token_ids) == place
        heard, later, _ = hear(ids, heard=heard, how=how)
        assert (heard.parts, heard.token_ids, heard.logprobs) == (whole.parts, whole.token_ids, whole.logprobs)
        assert heard.finished == whole.finished
        assert (later.num_output_tokens, later.num_reasoning_tokens) == (
            first.num_output_tokens,
            first.num_reasoning_tokens,
        )


_WORDS = st.sampled_from(
    [
        HERMES,
        "<tool_call>",
        "</tool_call>",
        "<think>",
        "</think>",
        "\n",
        "a😀",
        "{",
        "}}",
        '{"name": "add", "arguments": {',
        "STOP",
        "ST",
    ]
)


@settings(max_examples=60)
@given(
    st.lists(_WORDS, max_size=8),
    st.lists(st.integers(0, 80), max_size=6),
    st.sampled_from([(), ("STOP",), ("a", "}")]),
    st.booleans(),
)
def test_events_are_a_function_of_the_tokens(
    words: list[str], batches: list[int], stops: Sequence[str], ended: bool
) -> None:
    """Random output, with stop strings or without: coalescing changes nothing."""
    ids = encoded("".join(words))
    reason = common_pb2.FINISH_REASON_STOP if ended else common_pb2.FINISH_REASON_LENGTH
    whole, one, _ = hear(ids, reason=reason, stops=stops)
    parts, many, _ = hear(ids, batches, reason=reason, stops=stops)
    assert parts == whole
    assert one.num_output_tokens == many.num_output_tokens == len(whole.token_ids)
    assert whole.token_ids == ids[: len(whole.token_ids)]
    if not stops:
        assert whole.token_ids == ids


@pytest.mark.parametrize("batches", [(), range(200)])
def test_stop_strings_end_content_alone(batches: Sequence[int]) -> None:
    """What is thought and what is called is not cut, and nothing matches across them."""
    text = f"<think>one END</think>two EN{HERMES}D three END four"
    heard, choice, _ = hear(encoded(text), batches, stops=["END", "Zürich", "</tool_call>"])
    assert heard.parts == [
        ("reasoning", "", "one END"),
        ("content", "", "two EN"),
        ("call", "0:get_weather", ARGUMENTS),
        ("content", "", "D three "),
    ]
    assert heard.finished == pb.Finished(reason=common_pb2.FINISH_REASON_STOP, stop_string="END")
    assert choice.num_output_tokens == len(heard.token_ids)


# --- markers that are special tokens -----------------------------------------------------------------------------------


def with_special(*tokens: str) -> TextModel:
    """The built-in tokenizer with these as special tokens: its decoder leaves them out of any text."""
    tokenizer = tokenizers.Tokenizer.from_str(models.tiny_tokenizer().to_str())
    tokenizer.add_special_tokens([tokenizers.AddedToken(token, special=True, normalized=False) for token in tokens])
    return TextModel(tokenizer)


@pytest.mark.parametrize(
    ("name", "special", "text"),
    [
        ("mistral", ("[TOOL_CALLS]",), '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]'),
        ("mistral-args", ("[TOOL_CALLS]", "[ARGS]"), '[TOOL_CALLS]add[ARGS]{"a": 1}'),
        ("llama3", ("<|python_tag|>",), '<|python_tag|>{"name": "add", "parameters": {"a": 1}}'),
        ("hermes", ("<tool_call>", "</tool_call>"), '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'),
        (
            "kimi-k2",
            (
                "<|tool_calls_section_begin|>",
                "<|tool_call_begin|>",
                "<|tool_call_argument_begin|>",
                "<|tool_call_end|>",
            ),
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"
            '{"a": 1}<|tool_call_end|>',
        ),
        (
            "harmony",
            ("<|channel|>", "<|constrain|>", "<|message|>"),
            '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}',
        ),
        (
            "glm",
            ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
            "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>",
        ),
        ("gemma4", ("<|tool_call>", "<tool_call|>", '<|"|>'), "<|tool_call>call:add{a:1}<tool_call|>"),
    ],
)
def test_markers_that_are_special_tokens_are_seen(name: str, special: Sequence[str], text: str) -> None:
    """The detokenizer leaves special tokens out of text; parsers see those that are theirs, also behind half a character."""
    model = with_special(*special)
    ids = [*model.encode(text), EOS]
    assert len(ids) < len(models.tiny().encode(text))
    expected = [("call", "0:add", '{"a": 1}')]
    for batches in ((), range(len(ids))):
        assert hear(ids, batches, how=parsing(name), model=model)[0].parts == expected
    half = models.tiny().encode("😀")[:1]
    heard, _, _ = hear(
        [*half, *ids], how=parsing("hermes", reasoning="think") if name == "hermes" else parsing(name), model=model
    )
    assert heard.token_ids == [*half, *ids]
    if name != "llama3":
        assert heard.parts == [("content", "", "\N{REPLACEMENT CHARACTER}"), *expected]


def test_a_special_token_that_is_no_marker_has_no_text() -> None:
    """It is among the tokens, and nowhere else."""
    model = with_special("<|other|>")
    ids = [*model.encode("a<|other|>b"), EOS]
    heard, _, _ = hear(ids, model=model)
    assert heard.parts == [("content", "", "ab")]
    assert heard.token_ids == ids


def with_words(*words: str) -> TextModel:
    """The built-in tokenizer with these as further tokens, whatever parts of an answer they are of."""
    tokenizer = tokenizers.Tokenizer.from_str(models.tiny_tokenizer().to_str())
    tokenizer.add_tokens(list(words))
    return TextModel(tokenizer)


def test_a_token_of_two_parts_belongs_to_the_first() -> None:
    """Text of the second takes the next token, and the first waits for it; at the output's end all is the first's."""
    model = with_words("am</think>Yes")
    how = parsing(reasoning="think", is_open=True)
    ids = model.encode("I am</think>Yes, sir")
    for batches in ((), range(len(ids))):
        heard, _, _ = hear(ids, batches, how=how, model=model, reason=common_pb2.FINISH_REASON_LENGTH)
        assert heard.parts == [("reasoning", "", "I am"), ("content", "", "Yes, sir")]
        assert heard.token_ids == ids
    ids = model.encode("I am</think>Yes")
    heard, _, _ = hear(ids, how=how, model=model, reason=common_pb2.FINISH_REASON_LENGTH)
    assert heard.parts == [("reasoning", "", "I amYes")]
    ended, _, _ = hear([*ids, EOS], how=how, model=model)
    assert ended.parts == [("reasoning", "", "I am"), ("content", "", "Yes")]


_ACROSS = with_words(
    "am</think>Yes",
    "?<tool_call>",
    '</tool_call>!<tool_call>{"name": "add", "arguments": {}}</tool_call>.',
    "}}\n</tool_call>So",
    ';{"name": "add", "parameters": {"a',
    "[TOOL_CALLS]add[ARGS]{",
    "b[TOOL_CALLS]add{}c[TOOL_CALLS]add{",
    "]and",
)
_SPLIT_WORDS = st.sampled_from(
    [
        "<think>", "am</think>Yes", "</think>", "?<tool_call>", "<tool_call>", "</tool_call>", "a\U0001f600", "STOP", "ST",
        '{"name": "add", "arguments": {', '}}\n</tool_call>So', "}}", "\n", '{"name": "add", "parameters": {}}', "<|python_tag|>",
        ';{"name": "add", "parameters": {"a', '</tool_call>!<tool_call>{"name": "add", "arguments": {}}</tool_call>.',
        "[TOOL_CALLS]add[ARGS]{", "b[TOOL_CALLS]add{}c[TOOL_CALLS]add{",
        "<function=add>", "<parameter=a>b</parameter>", "\n<parameter=c>\n1", "\n</parameter>\n</function>",
        '[TOOL_CALLS][{"name": "add", "arguments": {}}', "]and",
    ]
)  # fmt: skip


@settings(max_examples=40)
@given(
    st.lists(_SPLIT_WORDS, max_size=8),
    st.sampled_from([*TOOL_FORMATS, "none"]),
    st.sampled_from(["think", "none"]),
    st.booleans(),
    st.lists(st.integers(0, 60), max_size=5),
    st.sampled_from([(), ("STOP",), ("o", "}")]),
    st.booleans(),
)
def test_a_reader_lost_behind_any_delta_gets_exactly_the_rest(
    words: list[str],
    tool_format: str,
    reasoning: str,
    is_open: bool,
    batches: list[int],
    stops: Sequence[str],
    ended: bool,
) -> None:
    """Random output with tokens of several parts: each delta has tokens, and behind each of them Resume tells what is missing."""
    how = parsing(tool_format, reasoning=reasoning, is_open=is_open)
    ids = [*_ACROSS.encode("".join(words)), *([EOS] if ended else [1000])]
    reason = common_pb2.FINISH_REASON_STOP if ended else common_pb2.FINISH_REASON_LENGTH

    def told(batches: Sequence[int], num_delivered: int = 0) -> list[AnyDelta | pb.Finished]:
        return list(
            events_of(ids, batches, how=how, model=_ACROSS, stops=stops, reason=reason, delivered=num_delivered)
        )

    events = told(batches)
    whole = Heard()
    for event in events:
        assert isinstance(event, pb.Finished) or event.token_ids
        whole.take(event)
    for i, event in enumerate(events[:-1]):
        heard = Heard()
        for known in events[: i + 1]:
            heard.take(known)
        for rest in told(batches[: i % 2], len(heard.token_ids)):
            heard.take(rest)
        assert heard == whole, event
