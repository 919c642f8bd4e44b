"""Collect the violations of a request, to report all at once. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from protos.common.v1 import common_pb2
from svc_common.errors import FieldViolation, InvalidArgument

MAX_VIOLATIONS = 16


@dataclass(slots=True)
class Violations:
    """Violations found so far in one request."""

    _found: list[FieldViolation] = field(default_factory=list)

    def add(self, name: str, description: str) -> None:
        """Add a violation; those after the first 16 are dropped."""
        if len(self._found) < MAX_VIOLATIONS:
            self._found.append(FieldViolation(name, description))

    def add_unknown_ids(self, token_ids: Sequence[int], name: str, limits: common_pb2.ModelLimits) -> None:
        """Add a violation for the first id outside the vocabulary, if any."""
        if not token_ids or max(token_ids) < limits.vocab_size:
            return
        i = next(i for i, token_id in enumerate(token_ids) if token_id >= limits.vocab_size)
        self.add(
            f"{name}[{i}]", f"is {token_ids[i]}, out of vocabulary: the model has {limits.vocab_size} tokens, from 0"
        )

    def raise_if_any(self) -> None:
        """Raise InvalidArgument with all violations, if any."""
        if self._found:
            message = "; ".join(f"{v.field}: {v.description}" for v in self._found)
            raise InvalidArgument(message, reason="INVALID_FIELD", violations=self._found)
