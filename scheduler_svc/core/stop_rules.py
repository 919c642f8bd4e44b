"""When a sequence ends by itself (R95, R140): below min_tokens never, then EOS, stop ids, lengths.

Only the model's length is stronger than min_tokens: one more token would have no place in its memory.
"""

from scheduler_svc.core.request import Sequence, SequenceStatus
from scheduler_svc.core.request_rules import StopRules


def stop_status(
    stop: StopRules, last: int, num_output: int, num_tokens: int, max_total_tokens: int
) -> SequenceStatus | None:
    """The final status that a last token brings to a sequence of that many tokens, or None."""
    if num_output == 0:
        return None
    if num_output >= stop.min_tokens:
        if (last in stop.eos_token_ids and not stop.ignore_eos) or last in stop.stop_token_ids:
            return SequenceStatus.FINISHED_STOPPED
        if num_output >= stop.max_tokens:
            return SequenceStatus.FINISHED_LENGTH_CAPPED
    return SequenceStatus.FINISHED_LENGTH_CAPPED if num_tokens >= max_total_tokens else None


def check_stop(sequence: Sequence, max_total_tokens: int) -> SequenceStatus | None:
    """The final status that its last token brings, or None. Sets `stop_token_id` when a token stopped it."""
    last = sequence.token_ids[-1]
    status = stop_status(sequence.request.stop, last, sequence.num_output_tokens, sequence.num_tokens, max_total_tokens)
    if status is SequenceStatus.FINISHED_STOPPED:
        sequence.stop_token_id = last
    return status
