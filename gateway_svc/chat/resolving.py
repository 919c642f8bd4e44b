"""Resolve a checked ChatRequest: prompt, grammar of forced calls, and output parsing. Pure; may take a second."""

import dataclasses
from collections.abc import Callable, Sequence

from gateway_svc.chat.calls_or_answer import answer_rules
from gateway_svc.chat.conversation import (
    ANY_PARAMETERS,
    NO_ARGUMENTS,
    parameters_of,
    template_messages,
    template_tools,
    template_variables,
    told_tools,
)
from gateway_svc.chat.parsing import ChatParsing
from gateway_svc.chat.tool_calls.forced_calls import MAX_CALLS, ForcedTool, Reasoning, forced_grammar
from gateway_svc.chat.tool_calls.format_choice import NONE, FormatChoice
from gateway_svc.chat.tool_calls.format_types import ReasoningFormat, ToolFormat
from gateway_svc.chat.tool_calls.parameter_types import ToolTypes, parameter_types
from gateway_svc.chat.tool_calls.tool_formats import HERMES
from gateway_svc.checks import validation
from gateway_svc.checks.tokenized_constraints import compiled_grammar
from gateway_svc.checks.tool_checks import is_forced
from gateway_svc.checks.validation import ResolvedRequest, SamplingDefaults
from gateway_svc.text.text_model import TextModel
from protos.common.v1 import common_pb2
from protos.inference.v1 import inference_pb2 as pb
from svc_common.errors import InvalidArgument
from svc_common.observability import telemetry
from svc_common.observability import trace_names as names


def resolve_chat(
    request: pb.ChatRequest,
    text: TextModel,
    limits: common_pb2.ModelLimits,
    defaults: SamplingDefaults,
    formats: FormatChoice,
    *,
    draw_seed: Callable[[], int] = validation.new_seed,
) -> ResolvedRequest:
    """Render, tokenise and apply the defaults.

    With structured output and no tools, the whole output is content. With callable tools besides, the output
    is either calls or such an answer, after any reasoning; if a call is forced, calls only. Raises
    InvalidArgument if the template refuses, and for tools that cannot be forced.
    """
    told = told_tools(request)
    prompt = text.apply_chat_template(
        template_messages(request.messages),
        tools=template_tools(told) or None,
        variables=template_variables(request),
        add_generation_prompt=_begins_answer(request),
        continue_final_message=request.continue_final_message,
    )
    telemetry.note_stage(names.TEMPLATED, {names.CHARACTERS: len(prompt)})
    # Refuse a prompt that its size alone shows to be too long, before tokenising it.
    validation.check_least_length(text.least_tokens(prompt), request, limits)
    token_ids = validation.truncated(
        request, text.encode(prompt, add_special_tokens=request.add_special_tokens), limits
    )
    telemetry.note_stage(names.TOKENIZED, {names.INPUT_TOKENS: len(token_ids)})
    output = _Output.of(request, told, text, formats, prompt)
    grammar = _call_grammar(request, output, text)
    resolved = validation.resolve(request, token_ids, limits, defaults, text, forced=grammar, draw_seed=draw_seed)
    return dataclasses.replace(resolved, parsing=output.parsing())


def _begins_answer(request: pb.ChatRequest) -> bool:
    """True if the prompt ends where an answer begins.

    Raises InvalidArgument if it should also continue the last message.
    """
    if not request.HasField("add_generation_prompt"):
        return not request.continue_final_message
    if request.add_generation_prompt and request.continue_final_message:
        raise InvalidArgument.field(
            "continue_final_message", "cannot be set together with add_generation_prompt; set one"
        )
    return request.add_generation_prompt


@dataclasses.dataclass(frozen=True, slots=True)
class _Output:
    """Possible contents of the output.

    `tools`: callable tools. `or_answer`: it may instead be an answer by the request's grammar.
    """

    tools: Sequence[pb.Tool]
    tool_format: ToolFormat | None
    reasoning_format: ReasoningFormat | None
    is_open: bool
    max_calls: int | None
    or_answer: bool

    @classmethod
    def of(
        cls, request: pb.ChatRequest, told: Sequence[pb.Tool], text: TextModel, formats: FormatChoice, prompt: str
    ) -> "_Output":
        """Choose the formats set by the operator or detected in the template; forced calls default to Hermes' format."""
        template = text.template_for(has_tools=bool(told))
        tool_format = formats.tools(template) if told else None
        if told and is_forced(request):
            tool_format = tool_format or HERMES
        is_structured = request.WhichOneof("structured_output") is not None
        if is_structured and tool_format is None:
            return cls((), None, None, False, None, False)
        reasoning = formats.reasoning(template)
        is_open = reasoning is not None and reasoning.is_open(prompt)
        or_answer = is_structured and not is_forced(request)
        return cls(_callable(request, told), tool_format, reasoning, is_open, _max_calls(request), or_answer)

    def parsing(self) -> ChatParsing:
        """Parsing rules of this output."""
        return ChatParsing(
            tool_format=NONE if self.tool_format is None else self.tool_format.name,
            tool_names=tuple(tool.name for tool in self.tools) if self.tool_format is not None else (),
            max_calls=self.max_calls,
            reasoning_format=NONE if self.reasoning_format is None else self.reasoning_format.name,
            reasoning_open=self.is_open,
            or_answer=self.or_answer,
            tool_types=self._tool_types(),
        )

    def _tool_types(self) -> ToolTypes:
        """Types of the tools' parameters, if the model writes values without them: in tags."""
        if self.tool_format is None or self.tool_format.syntax.parameter is None:
            return {}
        return {tool.name: parameter_types(parameters_of(tool)) for tool in self.tools}


def _callable(request: pb.ChatRequest, told: Sequence[pb.Tool]) -> Sequence[pb.Tool]:
    if request.tool_choice.WhichOneof("choice") != "name":
        return told
    return [tool for tool in told if tool.name == request.tool_choice.name]


def _max_calls(request: pb.ChatRequest) -> int | None:
    """Most calls allowed; None = any number, bounded only by the output's length."""
    if request.tool_choice.WhichOneof("choice") == "name":
        return 1
    several = not request.HasField("parallel_tool_calls") or request.parallel_tool_calls
    return None if several else 1


def _call_grammar(request: pb.ChatRequest, output: _Output, text: TextModel) -> common_pb2.Grammar | None:
    """Grammar of an output that must be calls, or calls or an answer; None for other outputs."""
    if output.tool_format is None or not (is_forced(request) or output.or_answer):
        return None
    # The answer's grammar must compile even if the output must be calls.
    answer = compiled_grammar(request, text)
    syntax = output.tool_format.syntax
    reasoning = None if output.reasoning_format is None else Reasoning(output.reasoning_format, output.is_open)
    thoughts = () if reasoning is None else reasoning.format.markers
    markers = {*syntax.markers, *thoughts}
    grammar = forced_grammar(
        syntax,
        _grammar_tools(request, output, text),
        {marker: token_id for token_id, marker in text.special_ids(markers).items()},
        max_calls=1 if syntax.is_single else output.max_calls or MAX_CALLS,
        reasoning=reasoning,
        answer=answer_rules(answer) if answer is not None and output.or_answer else (),
    )
    return text.made_grammar(grammar, "tools")


def _grammar_tools(request: pb.ChatRequest, output: _Output, text: TextModel) -> list[ForcedTool]:
    """Callable tools with their schemas.

    A schema that does not compile is refused if a call is forced, else it allows any object.
    """
    tools: list[ForcedTool] = []
    for i, tool in enumerate(request.tools):
        if tool not in output.tools:
            continue
        parameters = parameters_of(tool) if tool.parameters_json else NO_ARGUMENTS
        try:
            if tool.parameters_json:
                text.check_schema(tool.parameters_json, f"tools[{i}].parameters_json")
        except InvalidArgument:
            if is_forced(request):
                raise
            parameters = ANY_PARAMETERS
        tools.append(ForcedTool(tool.name, parameters))
    return tools
