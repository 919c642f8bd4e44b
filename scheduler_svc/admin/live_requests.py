"""ListRequests: the live requests, and why the waiting ones wait. Read only."""

from collections import Counter

from protos.inference.v1 import admin_pb2
from scheduler_svc.admin.messages import numbers_message
from scheduler_svc.observe.explanations import Explanations
from scheduler_svc.requests.live_request import LiveRequest
from scheduler_svc.requests.request_book import RequestBook
from svc_common.clock import unix_ns

_MOST_LISTED = 1_000


def live_requests_message(
    book: RequestBook, explanations: Explanations, step: int, max_requests: int
) -> admin_pb2.ListRequestsResponse:
    """All live requests, in order of arrival; the first `max_requests` are listed (0 = 1,000), the others counted."""
    answer = admin_pb2.ListRequestsResponse(step=step)
    counts: Counter[tuple[str, str]] = Counter()
    num_left = max_requests or _MOST_LISTED
    for live in book.live():
        queue, reason, numbers = explanations.reason_of(live)
        counts[queue, reason.value] += 1
        if num_left > 0:
            num_left -= 1
            message = _live_message(live, queue, reason.value)
            message.numbers.extend(numbers_message(numbers))
            answer.requests.append(message)
    answer.num_left_out = counts.total() - len(answer.requests)
    answer.reasons.extend(
        admin_pb2.ReasonCount(queue=queue, reason=reason, num_requests=count)
        for (queue, reason), count in sorted(counts.items())
    )
    return answer


def _live_message(live: LiveRequest, queue: str, reason: str) -> admin_pb2.LiveRequest:
    submission, time = live.submission, live.time
    return admin_pb2.LiveRequest(
        id=live.core_id,
        request_id=submission.request_id,
        tenant=submission.tenant,
        queue=queue,
        reason=reason,
        priority=-submission.priority,
        num_choices=len(live.output.choices),
        prompt_tokens=len(submission.prompt),
        output_tokens=live.output.num_tokens,
        cached_prompt_tokens=live.cached_prompt_tokens,
        arrived_ns=unix_ns(time.arrival_ns),
        started_ns=None if time.first_scheduled_ns is None else unix_ns(time.first_scheduled_ns),
        num_preemptions=time.num_preemptions,
    )
