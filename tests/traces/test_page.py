"""docs/tracing.md has every name that is on a span: those of the module of names here, those seen in traces where they are made."""

from svc_common.observability import trace_names as names
from tests.support.tracing_page import words

_PREFIXES = ("PREFIX", "LABEL", "STEP_PREFIX")


def test_every_name_is_in_the_page() -> None:
    """Spans, events and attributes."""
    page = words("tracing.md")
    ours = {value for key, value in vars(names).items() if key.isupper() and key not in _PREFIXES}
    assert len(ours) > 80
    assert sorted(ours - page) == []


def test_the_page_has_no_other_names() -> None:
    """What looks like an attribute of ours is one; names behind `quire.step.` and numbers of events come from elsewhere."""
    ours = {value for key, value in vars(names).items() if key.isupper()}
    attributes = {word for word in words("tracing.md") if word.startswith(("quire.", "gen_ai.")) and "=" not in word}
    free = {"quire.inference.v1.InferenceService/METHOD", "quire.label.NAME", "quire.NAME", "quire.step."}
    numbers = {"quire.by", "quire.lost_tokens", "quire.source", "quire.why", "quire.worker"}
    unknown = {a for a in attributes - ours - free - numbers if not a.startswith(names.STEP_PREFIX)}
    assert sorted(unknown) == []
