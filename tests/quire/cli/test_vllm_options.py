"""`quire up` with options as `vllm serve` has them."""

import pytest
import typer

from quire.cli import main
from quire.cli.options.vllm import INSTEAD, SAME_AS, translated, with_aliases
from quire.cli.serving.up import app


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


def test_every_option_of_vllm_is_read_or_answered() -> None:
    """What they are replaced by exists; what is answered does not exist here."""
    command = typer.main.get_command(app)
    ours = {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
    assert set(SAME_AS.values()) <= ours and not ours & {*SAME_AS, *INSTEAD}
    named = [word.strip(",:") for text in INSTEAD.values() for word in text.split() if word.startswith("--")]
    assert {*named} - {"--tls-cert", "--tls-key"} <= ours
    assert translated(["--port=3", "-tp", "2", "--model", "x"]) == [
        *("--http-port=3", "--tensor-parallel", "2", "--model", "x")
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("up", "--trust-remote-code"), "--trust-remote-code is an option of vLLM: leave it out"),
        (("up", "--api-key=x"), "--api-key is an option of vLLM: use --tenants FILE"),
        (
            ("serve", "Qwen/Qwen3-0.6B"),
            "to serve a model: quire up --model Qwen/Qwen3-0.6B, or quire run Qwen/Qwen3-0.6B",
        ),
    ],
)
def test_the_others_have_one_sentence(
    arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wrong option, before anything starts."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    said = capsys.readouterr().err
    assert ended.value.code == 2 and words in said and said.count("\n") == 1, said
