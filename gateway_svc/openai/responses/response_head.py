"""Fields of a response that repeat its request. Pure."""

from typing import Any

from gateway_svc.openai.responses.response_request import ResponseRequest, ResponseText
from svc_common import public_ids

Json = dict[str, Any]


def response_id(request_id: str) -> str:
    """Id of the response that a request makes."""
    return f"{public_ids.RESPONSE}_{request_id}"


def request_id_of(name: str) -> str:
    """Id of the request that made the response of id `name`."""
    return name.removeprefix(f"{public_ids.RESPONSE}_")


def response_head(request: ResponseRequest, request_id: str, model: str, created_at: int, *, is_stored: bool) -> Json:
    """Make the fields. Sampling fields that the request leaves out are null: the model's own defaults."""
    return {
        "id": response_id(request_id),
        "object": "response",
        "created_at": created_at,
        "model": model,
        "background": bool(request.background),
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": request.max_tool_calls,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "prompt_cache_key": request.prompt_cache_key,
        "reasoning": {"effort": request.reasoning and request.reasoning.effort, "summary": request.summary},
        "safety_identifier": request.safety_identifier,
        "service_tier": "default",
        "store": is_stored,
        "temperature": request.temperature,
        "text": _text(request.text or ResponseText()),
        "tool_choice": _tool_choice(request),
        "tools": [tool.model_dump() for tool in request.tools or []],
        "top_logprobs": request.top_logprobs or 0,
        "top_p": request.top_p,
        "truncation": "disabled",
        "user": request.user,
    }


def _text(text: ResponseText) -> Json:
    shown = {"type": "text"} if text.format is None else text.format.model_dump(by_alias=True, exclude_none=True)
    return {"format": shown, "verbosity": text.verbosity or "medium"}


def _tool_choice(request: ResponseRequest) -> Any:
    choice = request.tool_choice
    if choice is None or isinstance(choice, str):
        return choice or "auto"
    return choice.model_dump(exclude_unset=True)
