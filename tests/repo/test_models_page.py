"""docs/models.md says what the tests do."""

from tests import models_page
from tests.models_page import PAGE, REFUSALS, checks_in, collect, page, refused
from tests.support.checkpoints import CACHE_FAMILIES, FAMILIES, STATE_FAMILIES

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

_QUICK = ("llama", "gpt2")

@pytest.mark.parametrize("family", [f if f in _QUICK else pytest.param(f, marks=pytest.mark.long) for f in FAMILIES])
async def test_four(family):
    \"\"\"Some are quick.\"\"\"
"""


def test_the_page_is_fresh() -> None:
    """`python -m tests.models_page --write` would change nothing."""
    made = page(collect(), refused(REFUSALS.read_text(encoding="utf-8")))
    assert PAGE.read_text(encoding="utf-8") == made, "run `python -m tests.models_page --write`"


def test_every_family_is_checked() -> None:
    """Tokens and vectors of every family in the quick tier; beams, overlap and longer lives of every family in the long one."""
    checks = {check.name: check for check in collect()}
    for name in (
        "test_tokens_are_those_of_generate",
        "test_vectors_are_of_the_last_hidden_states",
    ):
        assert checks[name].quick == set(FAMILIES), name
    for name in (
        "test_tokens_are_those_of_generate_in_many_schedules",
        "test_beams_of_every_family",
        "test_every_family_with_overlap",
    ):
        assert (checks[name].quick, checks[name].families) == (set(), FAMILIES), name
    assert checks["test_tokens_of_states_are_those_of_generate"].families == STATE_FAMILIES
    for name in ("test_beams_of_families_with_states", "test_every_family_with_states_with_overlap"):
        assert (checks[name].quick, checks[name].families) == (set(), STATE_FAMILIES), name
    assert checks["test_answers_of_every_family_are_those_of_generate"].families == (*FAMILIES, *STATE_FAMILIES)
    for name in ("test_kills_change_no_token", "test_rounds_no_more_than_transformers"):
        assert checks[name].families == (*CACHE_FAMILIES, *STATE_FAMILIES), name
    assert models_page._TITLES.keys() == {*FAMILIES, *STATE_FAMILIES}


def test_families_are_read_from_decorators_and_fixtures() -> None:
    """Either way counts; a test without families does not; the first sentence is what the page says."""
    one, two, four = checks_in(_MODULE, "tests/x.py")
    assert (one.name, one.words, one.quick) == ("test_one", "First", set())
    assert (two.name, two.words, two.quick) == ("test_two", "A line that goes on", set(FAMILIES))
    assert set(one.families) < set(two.families) == set(four.families) == set(FAMILIES)
    assert (four.name, four.words, four.quick) == ("test_four", "Some are quick", {"llama", "gpt2"})
