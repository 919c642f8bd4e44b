"""Token model of a what-if: recorded tokens for each sequence, and an end if the recording has none."""

from collections.abc import Iterable
from statistics import median

from quire_tools.replay.observed import Observed
from quire_tools.simulation.token_model import mix
from scheduler_svc.core.request_rules import StopRules

_MOST = 2**31 - 1
_NUM_FILLERS = 1_000


class RecordedTokens:
    """A `TokenModel` of recorded tokens.

    A censored request ends where the recording leaves it, by a stop token or `max_tokens`; one without any
    token gets the median length of those that ended naturally. Unknown samples repeat the first one; beams,
    which depend on the surviving candidates, are pseudo-random.
    """

    def __init__(self, observed: Observed) -> None:
        visits = observed.visits
        self._outputs = {name: visit.outputs for name, visit in visits.items()}
        self._stops = {name: visit.request.stop for name, visit in visits.items()}
        self.censored = {name: None for name in visits if observed.is_censored(name)}
        usual = self._usual_length(name for name in visits if name not in self.censored)
        self._lengths = {name: self._known(name) or usual for name in self.censored}

    def _known(self, name: str) -> int:
        return max((len(tokens) for tokens in self._outputs[name].values()), default=0)

    def _usual_length(self, names: Iterable[str]) -> int:
        known = [length for name in names if (length := self._known(name))]
        return round(median(known)) if known else 1

    def last_token(self, request_id: str) -> int | None:
        """The `max_tokens` that ends a censored request without a stop token; None if it needs none."""
        if request_id not in self.censored or _stopper(self._stops[request_id]) is not None:
            return None
        return min(self._lengths[request_id], self._stops[request_id].max_tokens)

    def token(self, request_id: str, index: int, offset: int, choice: int = 0) -> int:
        """The token at that output offset; see `TokenModel`."""
        outputs = self._outputs.get(request_id, {})
        known = outputs.get(choice or index) or outputs.get(0) or []
        if offset < len(known):
            return known[offset]
        stop = _stopper(self._stops[request_id]) if request_id in self._stops else None
        if stop is not None and offset + 1 >= self._lengths.get(request_id, 0):
            return stop
        return _MOST - mix(offset, index) % _NUM_FILLERS

    def guess(self, request_id: str, index: int, offset: int) -> int:
        """A draft token, right two times of three."""
        token = self.token(request_id, index, offset)
        return token if mix(offset, index, 7) % 3 else token ^ 1

    def candidates(self, request_id: str, index: int, offset: int, width: int) -> list[tuple[int, float]]:
        """Beam candidates; see `TokenModel`."""
        first = mix(index, offset, len(request_id))
        return [(_MOST - (first + 7 * k) % _NUM_FILLERS, -0.1 * (1 + k) - first % 5 / 7) for k in range(2 * width)]


def _stopper(stop: StopRules) -> int | None:
    """A token that ends a sequence with these rules, if there is one."""
    ids = [*sorted(stop.stop_token_ids), *(() if stop.ignore_eos else sorted(stop.eos_token_ids))]
    return ids[0] if ids else None
