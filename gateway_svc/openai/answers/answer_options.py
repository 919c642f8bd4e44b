"""Options of an answer besides its text; a separate module because both requests and answers import it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """What one answer shows.

    `usage_last`: a stream ends with a usage chunk; `usage_always`: every chunk has usage. `echo`: outputs
    begin with the prompt, `echo_logprobs`: with its logprobs; `only_echo`: and nothing follows. `token_ids`,
    `tokens_as_ids`: vLLM's return_token_ids and return_tokens_as_token_ids. `prompt_logprobs`: vLLM's list of
    them. `reasoning`: show it.
    """

    usage_last: bool = False
    usage_always: bool = False
    echo: bool = False
    echo_logprobs: bool = False
    only_echo: bool = False
    token_ids: bool = False
    tokens_as_ids: bool = False
    prompt_logprobs: bool = False
    reasoning: bool = True
