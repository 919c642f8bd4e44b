"""docs/metrics.md says what the services count; that their registries have just that, the tests of each service say."""

from tests.metrics_page import PAGE, SERVICES, page


def test_the_page_is_fresh() -> None:
    """`python -m tests.metrics_page --write` would change nothing."""
    assert PAGE.read_text(encoding="utf-8") == page(), "run `python -m tests.metrics_page --write`"


def test_every_metric_is_explained() -> None:
    """Type, unit, values of each label, formula, what it serves and a query that is about it; each name once in a service."""
    for specs in SERVICES.values():
        assert len({spec.name for spec in specs}) == len(specs) > 5
        for spec in specs:
            assert all((spec.unit, spec.text, spec.formula, spec.serves, spec.query, *spec.labels.values())), spec.name
            assert spec.text.endswith(".") and spec.formula.endswith("."), spec.name
            assert spec.name in spec.query, spec.name
