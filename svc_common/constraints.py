"""Fields of a request that constrain its tokens, and the errors for constraints that cannot be met together.

Used by the gateway, which refuses some at once, and by the scheduler, to which the worker reports the others.
"""

from collections.abc import Sequence

from protos.common.v1 import common_pb2
from svc_common.errors import FieldViolation, InvalidArgument

GRAMMAR_FIELDS = {
    common_pb2.GRAMMAR_KIND_JSON_SCHEMA: "json_schema",
    common_pb2.GRAMMAR_KIND_REGEX: "regex",
    common_pb2.GRAMMAR_KIND_CHOICE: "choice",
    common_pb2.GRAMMAR_KIND_LARK: "lark",
}
"""Field name of each kind of grammar."""

ALLOWED, BAD_WORDS, MIN_TOKENS = "sampling.allowed_token_ids", "sampling.bad_words", "stop.min_tokens"


def grammar_field(sampling: common_pb2.ResolvedSampling) -> str:
    """Path of the grammar that is set; empty = none."""
    name = GRAMMAR_FIELDS.get(sampling.grammar.kind)
    return "" if name is None else f"structured_output.{name}"


def constraint_fields(sampling: common_pb2.ResolvedSampling, min_tokens: int) -> list[str]:
    """Paths of all fields of a request that may forbid tokens."""
    given = {
        grammar_field(sampling): sampling.grammar.kind,
        ALLOWED: sampling.allowed_token_ids,
        BAD_WORDS: sampling.bad_words,
        MIN_TOKENS: min_tokens,
    }
    return [name for name, is_given in given.items() if is_given]


def no_token_left(fields: Sequence[str], which: str) -> InvalidArgument:
    """Error: `fields` forbid every token. `which`: "first" or "further"."""
    others = f" together with {' and '.join(fields[1:])}" if len(fields) > 1 else ""
    what = f"leaves no {which} token to choose from{others}; loosen what it demands"
    return InvalidArgument(f"{fields[0]}: {what}", reason="NO_TOKEN_LEFT", violations=_violations(fields, what))


def grammar_limit(fields: Sequence[str]) -> InvalidArgument:
    """Error: a mask reached a limit of the grammar engine while the request ran."""
    what = "is too complex: one token took more work than the grammar engine allows; use fewer alternatives or smaller bounds"
    return InvalidArgument(f"{fields[0]}: {what}", reason="GRAMMAR_LIMIT", violations=_violations(fields, what))


def mask_budget(fields: Sequence[str], mean_ms: float) -> InvalidArgument:
    """Error: the masks of a sequence exceeded its CPU time budget while it ran."""
    what = (
        f"takes more than {mean_ms:g} ms of CPU time per token, which is the limit (--mask-budget-ms of the worker); "
        "make it less ambiguous, or use smaller bounds"
    )
    return InvalidArgument(f"{fields[0]}: {what}", reason="MASK_BUDGET", violations=_violations(fields, what))


def _violations(fields: Sequence[str], what: str) -> list[FieldViolation]:
    return [FieldViolation(field, what) for field in fields]
