"""What an answer shows besides its text; its own module, as both the requests and the answers know it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """Wishes for one answer.

    `usage_last`: a stream ends with a chunk of usage; `usage_always`: each chunk has it. `echo`: outputs begin with the prompt,
    `echo_logprobs`: with its log probabilities; `only_echo`: and nothing follows. `token_ids`, `tokens_as_ids`: vLLM's
    return_token_ids and return_tokens_as_token_ids. `prompt_logprobs`: vLLM's list of them. `reasoning`: show it.
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
