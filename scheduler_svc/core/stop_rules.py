"""When a sequence ends by itself (R140): below min_tokens never, then EOS, stop ids, lengths."""

from scheduler_svc.core.request import Sequence, SequenceStatus


def check_stop(sequence: Sequence, max_model_len: int) -> SequenceStatus | None:
    """The final status that its last token brings, or None. Sets `stop_token_id` when a token stopped it."""
    stop = sequence.request.stop
    num_output = sequence.num_output_tokens
    if num_output == 0 or num_output < stop.min_tokens:
        return None
    last = sequence.token_ids[-1]
    if (last in stop.eos_token_ids and not stop.ignore_eos) or last in stop.stop_token_ids:
        sequence.stop_token_id = last
        return SequenceStatus.FINISHED_STOPPED
    if sequence.num_tokens >= max_model_len or num_output >= stop.max_tokens:
        return SequenceStatus.FINISHED_LENGTH_CAPPED
    return None
