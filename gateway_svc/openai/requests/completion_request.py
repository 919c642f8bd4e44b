"""POST /v1/completions: convert the body to requests. Pure. Without `max_tokens`, the context is the limit.

lm-eval scores prompts by `echo` with logprobs, which returns those of the prompt. `max_tokens` 0 is allowed
only with echo; one token is then generated and discarded.
"""

from dataclasses import replace
from typing import ClassVar, TypeVar

from gateway_svc.http.json_body import Prompts, parse_body, prompts_of, refuse
from gateway_svc.openai.answers.answer_options import AnswerOptions
from gateway_svc.openai.requests import foreign_fields
from gateway_svc.openai.requests.fields import NEUTRAL, AnyRequests, GenerationFields, TopLogprobs
from gateway_svc.openai.requests.structured import FIELDS, set_structured_output
from protos.inference.v1 import inference_pb2 as pb

MAX_PROMPTS = 128

R = TypeVar("R", bound=GenerationFields)


class CompletionRequest(GenerationFields):
    """The request body. `logprobs`: of the chosen token and of that many likeliest ones."""

    NEUTRAL: ClassVar = NEUTRAL | {
        "add_special_tokens": (True,),
        "suffix": ("",),
        "top_logprobs": (0,),
        "max_completion_tokens": (),
        "tools": ([],),
        "functions": ([],),
    }

    prompt: Prompts
    logprobs: TopLogprobs | None = None
    echo: bool | None = None

    def options(self) -> AnswerOptions:
        """What the answer shows."""
        echo = bool(self.echo)
        return replace(
            super().options(),
            echo=echo,
            echo_logprobs=echo and self.logprobs is not None,
            only_echo=echo and self.max_tokens == 0,
        )

    def messages(self) -> AnyRequests:
        """Return one request per prompt."""
        prompts = prompts_of(self.prompt)
        if not 1 <= len(prompts) <= MAX_PROMPTS:
            refuse("prompt", f"has {len(prompts)} prompts; send 1 to {MAX_PROMPTS}")
        return list(map(self._message, prompts))

    def _message(self, prompt: str | list[int]) -> pb.GenerateRequest:
        given = {"text": prompt} if isinstance(prompt, str) else {"token_ids": pb.TokenIds(ids=prompt)}
        request = pb.GenerateRequest(**given)
        self.fill(request)
        if self.logprobs is not None:
            request.response.logprobs, request.response.num_top_logprobs = True, self.logprobs
        if self.echo:
            self._set_echo(request)
        return request

    def _set_echo(self, request: pb.GenerateRequest) -> None:
        options = self.options()
        if options.only_echo:
            request.stop.max_tokens = 1
        if options.echo_logprobs and self.prompt_logprobs is None:
            request.response.num_prompt_logprobs = self.logprobs or 0


def parse_request(cls: type[R], body: bytes) -> tuple[R, AnyRequests]:
    """Parse a body and convert it to requests.

    Raises InvalidArgument for no JSON object, wrong types and unsupported values.
    """
    neutral = foreign_fields.NEUTRAL | cls.NEUTRAL
    request, fields = parse_body(
        cls, body, neutral, instead=foreign_fields.INSTEAD, translate=foreign_fields.translated
    )
    messages = request.messages()
    if not fields.keys().isdisjoint(FIELDS):
        for message in messages:
            set_structured_output(message, fields)
    return request, messages
