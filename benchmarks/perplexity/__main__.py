"""Measures the perplexity of the built-in model in each format of quantized weights, beside the format's own package.

make peers PEERS="compressed-tensors ggml"
python -m benchmarks.perplexity --save
python -m benchmarks.perplexity --only GGUF --tokens 4096
"""

import json
import math
import platform
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from benchmarks import report
from benchmarks.command_line import progress
from benchmarks.compare.engines.environments import ROOT, PeerEnvironment
from benchmarks.perplexity.forms import Form, Place, forms, versions
from benchmarks.perplexity.reference import Windows
from models import tiny_corpus
from quire import LLM, SamplingParams
from quire.built_in_model import default_model

LIMIT = 1.01
"""Of the larger perplexity / the smaller one."""
WINDOW = 1_024
_END_OF_TEXT = 0
_HELP_END = """
The text: files of the standard library that the model was not trained on, cut into windows of 1,024 tokens, each with a context of
its own. Quire runs in process with its defaults, the references in float32.

Exit status 1 if a ratio is over the limit, or a reference failed. A format whose package is not installed is not compared.
"""


def held_out(num_tokens: int) -> list[list[int]]:
    """Windows of the held-out files, with `num_tokens` tokens in all, or as many as there are."""
    tokenizer, root = Tokenizer.from_file(str(default_model() / "tokenizer.json")), tiny_corpus.library_root()
    ids: list[int] = []
    for path in tiny_corpus.source_files(root):
        if len(ids) < num_tokens and tiny_corpus.is_held_out(path.relative_to(root).as_posix()):
            ids += [_END_OF_TEXT, *tokenizer.encode(tiny_corpus.read_text(path)).ids]
    windows = (ids[at : min(at + WINDOW, num_tokens)] for at in range(0, min(len(ids), num_tokens), WINDOW))
    return [window for window in windows if len(window) > 1]


def quire_perplexity(checkpoint: Path, windows: Windows, **settings: Any) -> float:
    """Perplexity of all tokens of the windows but their first ones, as `LLM` computes it."""
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    with LLM(checkpoint, kv_cache_memory="64MiB", **settings) as llm:
        outputs = llm.generate([{"prompt_token_ids": list(window)} for window in windows], params, use_tqdm=False)
    found = [
        given[token].logprob
        for window, output in zip(windows, outputs, strict=True)
        for token, given in zip(window[1:], (output.prompt_logprobs or [])[1:], strict=True)
        if given is not None
    ]
    return math.exp(-sum(found) / len(found))


def compared(form: Form, windows: Windows, peers: Path) -> dict[str, Any]:
    """The figures of a format, or why there are none."""
    peer = PeerEnvironment(peers, form.peer)
    if form.peer and (missing := peer.missing()):
        return {"not_compared": missing}
    with tempfile.TemporaryDirectory() as folder:
        try:
            checkpoint, expected = form.store(Place(Path(folder), windows, peer))
        except RuntimeError as error:
            return {"not_compared": str(error)[-200:], "passed": False}
        found = quire_perplexity(checkpoint, windows, **form.settings)
    ratio = found / expected
    passed = max(ratio, 1 / ratio) <= LIMIT if form.is_limited else None
    return {"quire": round(found, 4), "expected": round(expected, 4), "ratio": round(ratio, 5), "passed": passed}


def measure(names: Sequence[str], num_tokens: int, peers: Path) -> dict[str, Any]:
    """Figures by name of the format."""
    windows, chosen = held_out(num_tokens), forms()
    with progress("formats", len(names)) as done:
        found = {}
        for name in names:
            found[name] = {"reference": chosen[name].reference, **compared(chosen[name], windows, peers)}
            done()
    text = {
        "text": f"held out of Python {platform.python_version()}",
        "tokens": sum(map(len, windows)),
        "window": WINDOW,
    }
    return text | {"references": versions(peers), "limit": LIMIT, "formats": found}


def table(result: dict[str, Any]) -> Table:
    """One row per format."""
    made = Table("format", "reference", "Quire", "reference", "ratio", "limit", "passed")
    passed = {True: "yes", False: "NO", None: "-"}
    for name, row in result["formats"].items():
        if "ratio" in row:
            figures = (f"{row['quire']:.3f}", f"{row['expected']:.3f}", f"{row['ratio']:.4f}")
            limit = "-" if row["passed"] is None else f"{result['limit']}"
            made.add_row(name, row["reference"], *figures, limit, passed[row["passed"]])
        else:
            made.add_row(name, row["reference"], "", "", "", "", row["not_compared"])
    return made


def main(
    only: Annotated[str, typer.Option(help="Formats whose name contains this.")] = "",
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of the text.")] = 20_480,
    peers: Annotated[Path, typer.Option(help="Folder of the packages' environments.")] = ROOT / ".venv" / "peers",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    save: Annotated[bool, typer.Option("--save", help="Write benchmarks/results/perplexity.json.")] = False,
) -> None:
    """Measures the perplexity of the built-in model in each format of quantized weights."""
    names = [name for name in forms() if only in name]
    if not names:
        raise typer.BadParameter(f"no format's name contains {only!r}; formats: {'; '.join(forms())}")
    result = {"benchmark": "perplexity", **measure(names, tokens, peers)}
    if save:
        report.save("perplexity", result)
    if as_json:
        print(json.dumps(result, indent=2))
    else:
        Console().print(table(result))
    if any(row.get("passed") is False for row in result["formats"].values()):
        raise typer.Exit(1)


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(epilog=_HELP_END)(main)
    app()
