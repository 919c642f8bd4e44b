"""docs/models.md says what the tests do."""

from tests import models_page
from tests.checkpoints import FAMILIES
from tests.models_page import PAGE, REFUSALS, checks_in, collect, page, refused

_MODULE = """
@pytest.fixture(params=[family for family in DENSE_FAMILIES])
def world(request): ...

@pytest.mark.long
def test_one(world):
    \"\"\"First. Second.\"\"\"

@pytest.mark.parametrize("family", FAMILIES)
def test_two(family):
    \"\"\"A line
    that goes on.\"\"\"

def test_three(): ...
"""


def test_the_page_is_fresh() -> None:
    """`python -m tests.models_page --write` would change nothing."""
    made = page(collect(), refused(REFUSALS.read_text(encoding="utf-8")))
    assert PAGE.read_text(encoding="utf-8") == made, "run `python -m tests.models_page --write`"


def test_every_family_is_checked() -> None:
    """Tokens and vectors of every family, in the quick tier."""
    quick = {check.name: check.families for check in collect() if not check.long}
    for name in ("test_sample", "test_poisoned_sample", "test_vectors_are_of_the_last_hidden_states"):
        assert quick[name] == FAMILIES, name
    assert models_page._TITLES.keys() == set(FAMILIES)


def test_families_are_read_from_decorators_and_fixtures() -> None:
    """Either way counts; a test without families does not; the first sentence is what the page says."""
    one, two = checks_in(_MODULE, "tests/x.py")
    assert (one.name, one.words, one.long) == ("test_one", "First", True)
    assert (two.name, two.words, two.long) == ("test_two", "A line that goes on", False)
    assert set(one.families) < set(two.families) == set(FAMILIES)
