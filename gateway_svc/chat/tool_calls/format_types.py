"""What a format of tool calls or of reasoning consists of."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gateway_svc.chat.reasoning import ReasoningParser
from gateway_svc.chat.tool_calls.call_parser_base import CallParser, CallRules
from gateway_svc.chat.tool_calls.harmony import HarmonyParser
from gateway_svc.chat.tool_calls.marked_calls import CallMarkup, MarkedParser
from gateway_svc.chat.tool_calls.parameter_grammar import ParameterSyntax
from gateway_svc.text.output_parser import OutputParser

NO_TOOLS = CallRules(frozenset(), str)


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """Syntax of forced calls: texts and markers in order, with placeholders of `pieces`.

    `before` and `after` all calls, and `between` two of them. `is_single`: the model ends its turn after one
    call. `parameter`: of arguments that are parameters in tags; None = they are a JSON object.
    """

    call: Sequence[str]
    between: Sequence[str] = ()
    before: Sequence[str] = ()
    after: Sequence[str] = ()
    is_single: bool = False
    parameter: ParameterSyntax | None = None

    @property
    def markers(self) -> frozenset[str]:
        """All texts, some of which may be special tokens of a model."""
        tags = () if self.parameter is None else (*self.parameter.before, self.parameter.close, *self.parameter.after)
        return frozenset((*self.before, *self.call, *self.between, *self.after, *tags))


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """Tool-call format of a model family. `fits`: tests whether a chat template's source is of that family."""

    name: str
    fits: Callable[[str], bool]
    parser: Callable[[CallRules], CallParser]
    syntax: CallSyntax
    id_prefix: str = "call_"
    num_id_chars: int = 24

    @property
    def head(self) -> str:
        """Start of forced calls.

        For a JSON object only the brace, since white space may follow it if a JSON answer is also allowed.
        """
        first = (*self.syntax.before, *self.syntax.call)[0]
        return first[0] if first.startswith("{") else first

    def call_id(self, seed: str) -> str:
        """Call id in the family's form, derived from `seed`."""
        return self.id_prefix + hashlib.sha256(seed.encode()).hexdigest()[: self.num_id_chars]


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Reasoning markers of a model family.

    `begins` and `ends`: alternatives, each as texts and markers in order; forced output has the first.
    `after` and `before_answer`: texts and markers of forced output after the reasoning and before an answer.
    `hidden`: markers that are markup in the answer. `has_channels`: reasoning may stand anywhere, and the
    family's parser of calls reads it.
    """

    name: str
    fits: Callable[[str], bool]
    begins: Sequence[Sequence[str]]
    ends: Sequence[Sequence[str]]
    after: Sequence[str] = ()
    before_answer: Sequence[str] = ()
    hidden: Sequence[str] = ()
    has_channels: bool = False

    @property
    def markers(self) -> frozenset[str]:
        """All markers."""
        return frozenset(text for texts in (*self.begins, *self.ends, self.after, self.before_answer) for text in texts)

    def is_open(self, prompt: str) -> bool:
        """True if the prompt's end opens the reasoning."""
        return prompt.rstrip().endswith(tuple("".join(begin).rstrip() for begin in self.begins))

    def parser(self, answer: OutputParser | None, *, is_open: bool) -> OutputParser:
        """Make a parser of reasoning. `answer`: parses the rest; None = all of it is content."""
        if self.has_channels:
            return answer or HarmonyParser(NO_TOOLS)
        if answer is None and self.hidden:
            answer = MarkedParser(CallMarkup((), hidden=self.hidden), NO_TOOLS)
        begins, ends = (["".join(texts) for texts in alternatives] for alternatives in (self.begins, self.ends))
        parser = ReasoningParser(answer, begins, ends, is_open=is_open)
        parser.markers |= self.markers
        return parser
