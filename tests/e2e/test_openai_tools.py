"""Tools of others that speak OpenAI's API, unchanged, on a running stack (docs/openai-tools.md)."""

import json
from pathlib import Path
from typing import Any

import pytest

from quire.local_stack.stack import LocalStack
from tests.support.client_tools import run_tool, tool_environment
from tests.support.stack.commands import ROOT

CLIENTS = ROOT / "tests" / "clients"
TINY = ROOT / "models" / "tiny"

# The first run of each installs it.
pytestmark = [pytest.mark.long, pytest.mark.timeout(1_200)]


@pytest.mark.parametrize("tool", ["litellm", "agents", "llama-index", "pydantic-ai", "llm"])
def test_libraries(tool: str, stack: LocalStack, tmp_path: Path) -> None:
    """Libraries' own calls: chat, streams, tools' round trips, typed answers, vectors, errors."""
    tool_environment(tool)
    program = CLIENTS / f"{tool.replace('-', '_')}_calls.py"
    said = run_tool(tool, "python", str(program), f"{stack.http_url}/v1", cwd=tmp_path)
    assert said.endswith("all calls answered\n")


def lm_eval(model: str, options: str, tasks: str, cwd: Path, *more: str) -> dict[str, Any]:
    """Results by task of `lm_eval run` on our questions, which are files of this folder."""
    for name in ("choose.yaml", "write.yaml"):
        text = (CLIENTS / "lm_eval" / name).read_text(encoding="utf-8")
        (cwd / name).write_text(text.replace("QUESTIONS", str(CLIENTS / "lm_eval" / "questions.jsonl")))
    arguments = ["--model", model, "--model_args", options, "--tasks", tasks, "--include_path", ".", *more]
    run_tool("lm-eval", "lm_eval", "run", *arguments, "--output_path", "results.json", cwd=cwd)
    (report,) = cwd.glob("results*.json")
    return dict(json.loads(report.read_text(encoding="utf-8"))["results"])


def test_lm_eval_completions(stack: LocalStack, tmp_path: Path) -> None:
    """Log likelihoods of given texts, by tokens, choose what is Python; text is generated until a stop string."""
    options = f"model=tiny,base_url={stack.http_url}/v1/completions,tokenizer={TINY},num_concurrent=2,max_retries=1"
    results = lm_eval("local-completions", options, "quire_choose,quire_write", tmp_path)
    assert results["quire_choose"]["acc,none"] == 1.0
    assert "exact_match,none" in results["quire_write"]


def test_lm_eval_chat(stack: LocalStack, tmp_path: Path) -> None:
    """The same questions as conversations."""
    options = f"model=tiny,base_url={stack.http_url}/v1/chat/completions,num_concurrent=2,max_retries=1"
    results = lm_eval("local-chat-completions", options, "quire_write", tmp_path, "--apply_chat_template")
    assert "exact_match,none" in results["quire_write"]


def test_guidellm(stack: LocalStack, tmp_path: Path) -> None:
    """A benchmark with made-up prompts: all requests succeed, each with as many tokens as asked for."""
    run_tool(
        "guidellm",
        "guidellm",
        "run",
        *("--backend", f"kind=openai_http,target={stack.http_url},model=tiny"),
        *("--profile", "kind=concurrent,streams=4", "--constraint", "kind=max_requests,count=16"),
        *("--tokenizer", f"kind=huggingface_auto,model={TINY}"),
        *("--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=16"),
        *("--output", "kind=json,path=report.json", "--disable-console"),
        cwd=tmp_path,
    )
    (benchmark,) = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"], totals["incomplete"]) == (16, 0, 0)
    assert {request["output_tokens"] for request in benchmark["requests"]["successful"]} == {16}
