"""Measures the steps that draft tokens save, for each proposer, on a language that the models have learnt.

    python -m benchmarks.drafts               # a table; trains for half a minute
    python -m benchmarks.drafts --json        # one JSON object, nothing else

The same requests run without drafts and with each proposer, one after the other, and must give the same tokens. A step saved is a
pass of the model saved. The models are tiny: of their times only Quire's own share would be seen, so they are not reported.
"""

import json
import random
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from benchmarks import report
from benchmarks.drafts.language import Language, make_draft_model, make_model
from quire import LLM, SamplingParams

_PROMPT = 24
_OUTPUT = 96


def ways(model: Path, draft: Path) -> dict[str, dict[str, Any]]:
    """Settings of each proposer, by name."""
    return {"ngram": {"drafts": "ngram"}, "model": {"draft_model": draft}, "mtp": {"drafts": "mtp"}}


def measure(folder: Path, *, batches: int, num_drafts: int, requests: int, temperature: float) -> dict[str, Any]:
    """Steps without drafts, and for each proposer steps and the share of draft tokens that were right. Requests run one by one."""
    language, draw = Language(0), random.Random(7)
    model = make_model(folder / "model", language, batches)
    draft = make_draft_model(folder / "draft", language, batches)
    prompts = [language.text(_PROMPT, draw) for _ in range(requests)]
    plain, steps = _run(model, prompts, 0, temperature, {})
    found: dict[str, Any] = {"none": {"steps": len(steps)}}
    for name, settings in ways(model, draft).items():
        tokens, steps = _run(model, prompts, num_drafts, temperature, settings)
        if tokens != plain:
            raise SystemExit(f"{name}: the tokens differ from those without drafts, which is a defect of Quire")
        found[name] = {"steps": len(steps), "saved": round(1 - len(steps) / found["none"]["steps"], 3)}
        found[name]["right"] = round(_right(steps), 3)
    return found


def _run(
    model: Path, prompts: list[list[int]], num_drafts: int, temperature: float, settings: dict[str, Any]
) -> tuple[list[list[int]], list[dict[str, Any]]]:
    sets = {"num_spec_tokens": num_drafts}
    with LLM(
        model,
        dtype="float32",
        max_model_len=256,
        num_gpu_blocks_override=64,
        policy_set=sets,
        log_steps=True,
        **settings,
    ) as llm:
        tokens = []
        for number, prompt in enumerate(prompts):
            params = SamplingParams(temperature=temperature, seed=number, max_tokens=_OUTPUT, ignore_eos=True)
            tokens.append(list(llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids))
        return tokens, llm.steps()


def _right(steps: list[dict[str, Any]]) -> float:
    """Share of draft tokens that were accepted."""
    decoding = [(entry, step["sampled"]) for step in steps for entry in step["scheduled"] if not entry["prefill"]]
    asked = sum(entry["tokens"] - 1 for entry, _ in decoding)
    right = sum(len(sampled[entry["seqs"][0]]) - 1 for entry, sampled in decoding)
    return right / max(1, asked)


app = typer.Typer(rich_markup_mode="rich", add_completion=False)


@app.command()
def main(
    batches: Annotated[int, typer.Option(help="Of training, for each model.", min=1)] = 500,
    drafts: Annotated[int, typer.Option(help="Draft tokens of a step.", min=1)] = 3,
    requests: Annotated[int, typer.Option(min=1)] = 12,
    temperature: Annotated[float, typer.Option(help="0 = greedy.", min=0)] = 0.7,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, nothing else.")] = False,
) -> None:
    """Measure the steps that draft tokens save."""
    sizes = {"batches": batches, "num_drafts": drafts, "requests": requests, "temperature": temperature}
    with TemporaryDirectory() as folder:
        found = measure(Path(folder), **sizes)  # type: ignore[arg-type]
    if as_json:
        sys.stdout.write(
            json.dumps({**report.provenance(), "benchmark": "drafts", **sizes, "proposers": found}, indent=2) + "\n"
        )
        return
    table = Table("proposer", "steps", "saved", "draft tokens right")
    for name, each in found.items():
        shares = [f"{each[key]:.0%}" if key in each else "" for key in ("saved", "right")]
        table.add_row(name, str(each["steps"]), *shares)
    Console().print(table)


if __name__ == "__main__":
    app()
