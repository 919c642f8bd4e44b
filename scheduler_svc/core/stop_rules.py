"""Stop rules: never below min_tokens; then EOS, stop token ids and length limits.

Only the model's length limit overrides min_tokens, as there is no KV slot for one more token.
"""

from scheduler_svc.core.request import Sequence, SequenceStatus
from scheduler_svc.core.request_rules import StopRules


def stop_status(
    stop: StopRules, last: int, num_output: int, num_tokens: int, max_total_tokens: int
) -> SequenceStatus | None:
    """Final status of a sequence of that length with that last token, or None if it continues."""
    if num_output == 0:
        return None
    if num_output >= stop.min_tokens:
        if (last in stop.eos_token_ids and not stop.ignore_eos) or last in stop.stop_token_ids:
            return SequenceStatus.FINISHED_STOPPED
        if num_output >= stop.max_tokens:
            return SequenceStatus.FINISHED_LENGTH_CAPPED
    return SequenceStatus.FINISHED_LENGTH_CAPPED if num_tokens >= max_total_tokens else None


def check_stop(sequence: Sequence, max_total_tokens: int) -> SequenceStatus | None:
    """Final status that the last token of a sequence brings, or None. Sets `stop_token_id` when a token stopped it."""
    last = sequence.token_ids[-1]
    status = stop_status(sequence.request.stop, last, sequence.num_output_tokens, sequence.num_tokens, max_total_tokens)
    if status is SequenceStatus.FINISHED_STOPPED:
        sequence.stop_token_id = last
    return status
