"""`--served-model-name A B`: names as vLLM writes them."""

import pytest

from quire.cli.options.names import with_aliases


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("--served-model-name A", "--served-model-name A"),
        ("--served-model-name A B C", "--served-model-name A --model-alias B --model-alias C"),
        (
            "--policy quire --served-model-name A B --port 3",
            "--policy quire --served-model-name A --model-alias B --port 3",
        ),
        ("--served-model-name", "--served-model-name"),
        ("A B", "A B"),
    ],
)
def test_names_after_the_first_are_aliases(given: str, read: str) -> None:
    """Only those of the list, which the next option ends."""
    assert with_aliases(given.split()) == read.split()
