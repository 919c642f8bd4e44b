"""The benchmark of perplexity: a format beside the package that defines it, one that differs, one without its package."""

from dataclasses import replace
from pathlib import Path

import pytest
import typer
from tokenizers import Tokenizer

from benchmarks.perplexity import __main__ as perplexity
from benchmarks.perplexity.forms import forms
from models import tiny_corpus
from quire.built_in_model import default_model

WITHOUT_PACKAGES = [name for name, form in forms().items() if not form.peer]


def test_the_text_was_held_out() -> None:
    """As many tokens as are asked for, in windows, from the first file that the model was not trained on."""
    windows, root = perplexity.held_out(1_500), tiny_corpus.library_root()
    assert [len(window) for window in windows] == [1_024, 476]
    names = (path.relative_to(root).as_posix() for path in tiny_corpus.source_files(root))
    first = next(name for name in names if tiny_corpus.is_held_out(name))
    text = Tokenizer.from_file(str(default_model() / "tokenizer.json")).decode(windows[0][1:])
    assert tiny_corpus.read_text(root / first).startswith(text[:500])


def test_a_format_has_its_perplexity(tmp_path: Path) -> None:
    """Q4_0 is gguf's, and not that of another form; a reference that is far off is over the limit."""
    form, windows = forms()["GGUF Q4_0"], perplexity.held_out(128)
    found = perplexity.compared(form, windows, tmp_path)
    assert found["passed"] and found["quire"] != found["expected"]
    wrong = replace(form, store=lambda place: (default_model(), found["expected"] * 1.1))
    assert perplexity.compared(wrong, windows, tmp_path)["passed"] is False


def test_without_its_package_a_format_is_not_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is not passed, and the table names the remedy; a reference that fails is an error."""
    perplexity.main(only="NVFP4", tokens=64, peers=tmp_path)
    assert "make peers" in capsys.readouterr().out

    def fails(place: object) -> tuple[Path, float]:
        raise RuntimeError("no such scheme")

    broken = {"NVFP4": replace(forms()["NVFP4"], peer="", store=fails)}
    monkeypatch.setattr(perplexity, "forms", lambda: broken)
    with pytest.raises(typer.Exit):
        perplexity.main(only="NVFP4", tokens=64, peers=tmp_path, as_json=True)
    assert '"not_compared": "no such scheme"' in capsys.readouterr().out
    with pytest.raises(typer.BadParameter, match="formats: NVFP4"):
        perplexity.main(only="Q4_7", peers=tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("name", WITHOUT_PACKAGES)
def test_every_format_has_its_perplexity(name: str, tmp_path: Path) -> None:
    """All whose references need no environment of their own; Quire's own rounding costs less than 5 %."""
    found = perplexity.compared(forms()[name], perplexity.held_out(2_048), tmp_path)
    assert found["passed"] is not False and found["ratio"] < 1.05
