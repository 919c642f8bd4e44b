"""Resuming a request: the tokens that each reader already has. Pure.

Text is a function of tokens. A later reader, at any gateway, therefore processes all tokens of a choice from
the first and gets events only for those after its own position (`choice_events`). Attaching at the scheduler
is in `scheduler_link`.
"""

from collections.abc import Sequence

from gateway_svc.requests.engine_request import EngineRequest
from protos.inference.v1 import inference_pb2
from svc_common.errors import FieldViolation, InvalidArgument, OutOfRange


def num_delivered(request: EngineRequest, positions: Sequence[inference_pb2.ChoicePosition]) -> list[int]:
    """Number of tokens of each choice that the reader has.

    Raises InvalidArgument or OutOfRange naming an impossible position.
    """
    found = [0] * request.num_choices
    for i, position in enumerate(positions):
        if position.choice >= len(found):
            raise InvalidArgument.field(
                f"positions[{i}].choice", f"is {position.choice}; the request has {len(found)} choices, from 0 on"
            )
        if any(earlier.choice == position.choice for earlier in positions[:i]):
            raise InvalidArgument.field(f"positions[{i}].choice", "is that of a position before it; name each once")
        found[position.choice] = position.token_offset
        _check_made(request, i, position)
    return found


def _check_made(request: EngineRequest, index: int, position: inference_pb2.ChoicePosition) -> None:
    """Refuse a position beyond the tokens generated.

    A request restarted after the loss of its scheduler has no tokens yet; it will regenerate them, so it is
    not checked.
    """
    made = request.num_made[position.choice] if position.choice < len(request.num_made) else None
    if made is not None and position.token_offset > made:
        field, what = f"positions[{index}].token_offset", f"is {position.token_offset}; only {made} tokens were made"
        raise OutOfRange(
            f"{field}: {what}; resume behind the tokens that you have",
            reason="RESUME_AHEAD",
            metadata={"num_tokens": str(made)},
            violations=[FieldViolation(field, what)],
        )
