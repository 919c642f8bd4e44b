"""vLLM's pooling routes with the built-in model: scores are those that embeddings and log probabilities give."""

import json
import math
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from quire.local_stack.stack import LocalStack
from svc_common.errors import ConfigError
from tests.support.services.scripted_engine import Gateway, asynchronous, gateway

pytestmark = pytest.mark.processes
QUERY, DOCUMENTS = "def read(path):", ["open a file", "import socket", "close the file"]
TEMPLATE = "{{ messages[0].role }}: {{ messages[0].content }}\n{{ messages[1].role }}: {{ messages[1].content }}"


def client_of(running: Gateway) -> httpx.AsyncClient:
    """Over HTTP."""
    return httpx.AsyncClient(base_url=f"http://{running.http}", timeout=120)


async def post(client: httpx.AsyncClient, path: str, **fields: Any) -> dict[str, Any]:
    """The answer of a call that must succeed."""
    answer = await client.post(path, json=fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


@asynchronous
async def test_scores_are_cosines_of_embeddings(stack: LocalStack) -> None:
    """All paths and names of fields; one text with several or pairs; a rerank is the same scores, best first."""
    async with gateway(stack.scheduler_address) as running, client_of(running) as client:
        made = await post(client, "/v1/embeddings", input=[QUERY, *DOCUMENTS])
        first, *others = (np.array(each["embedding"]) for each in made["data"])
        cosines = [float(first @ other) for other in others]
        for path, names in (("/score", ("text_1", "text_2")), ("/v1/score", ("queries", "documents"))):
            scored = await post(client, path, **dict(zip(names, (QUERY, DOCUMENTS), strict=True)))
            np.testing.assert_allclose([each["score"] for each in scored["data"]], cosines, atol=1e-6)
            assert scored["usage"] == {key: made["usage"][key] for key in ("prompt_tokens", "total_tokens")}
            assert (scored["object"], scored["model"], scored["data"][1]["index"]) == ("list", "tiny", 1)
        paired = await post(client, "/score", data_1=DOCUMENTS, data_2=DOCUMENTS)
        np.testing.assert_allclose([each["score"] for each in paired["data"]], 1, atol=1e-6)
        order = sorted(range(3), key=lambda i: -cosines[i])
        for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
            ranked = await post(client, path, query=QUERY, documents=[{"text": DOCUMENTS[0]}, *DOCUMENTS[1:]], top_n=2)
            assert [each["index"] for each in ranked["results"]] == order[:2]
            assert ranked["results"][0]["document"] == {"text": DOCUMENTS[order[0]]}
            assert math.isclose(ranked["results"][0]["relevance_score"], cosines[order[0]], abs_tol=1e-6)
        bare = await post(client, "/rerank", query=QUERY, documents=DOCUMENTS, return_documents=False)
        assert [sorted(each) for each in bare["results"]] == [["index", "relevance_score"]] * 3
        pooled = await post(client, "/pooling", input=[QUERY], task="embed")
        assert pooled["data"][0]["object"] == "pooling"
        np.testing.assert_allclose(pooled["data"][0]["data"], first, atol=1e-6)


async def logprob(client: httpx.AsyncClient, prompt: list[int], label: int) -> float:
    """Of a token after a prompt, by the log probabilities of a longer prompt."""
    asked = {"prompt": [*prompt, label], "max_tokens": 1, "prompt_logprobs": 0}
    answer = await post(client, "/v1/completions", **asked)
    return float(answer["choices"][0]["prompt_logprobs"][-1][str(label)]["logprob"])


@asynchronous
async def test_labels_are_probabilities_of_the_next_token(stack: LocalStack, tmp_path: Path) -> None:
    """Among the labels or among all tokens; a score template makes rerankers of a decoder. Prompts are the template's."""
    path = tmp_path / "score.jinja"
    path.write_text(TEMPLATE)
    changes = {"score_template": path, "score_tokens": "in,is"}
    async with gateway(stack.scheduler_address, **changes) as running, client_of(running) as client:
        encode = {
            text: (await post(client, "/tokenize", prompt=text, add_special_tokens=False))["tokens"]
            for text in (QUERY, *DOCUMENTS[:2], "in", "is", f"query: {QUERY}\ndocument: {DOCUMENTS[0]}")
        }
        [label], [other] = encode["in"], encode["is"]
        fields = {"query": encode[QUERY], "items": DOCUMENTS[:2], "label_token_ids": [label, other]}
        among = await post(client, "/generative_scoring", **fields)
        whole = await post(client, "/generative_scoring", **fields, apply_softmax=False)
        for i, document in enumerate(DOCUMENTS[:2]):
            prompt = [*encode[QUERY], *encode[document]]
            wanted, against = await logprob(client, prompt, label), await logprob(client, prompt, other)
            assert math.isclose(whole["data"][i]["score"], math.exp(wanted), rel_tol=1e-3)
            assert math.isclose(among["data"][i]["score"], 1 / (1 + math.exp(against - wanted)), rel_tol=1e-3)
        prompt = encode[f"query: {QUERY}\ndocument: {DOCUMENTS[0]}"]
        [scored] = (await post(client, "/score", text_1=QUERY, text_2=DOCUMENTS[0]))["data"]
        wanted, against = await logprob(client, prompt, label), await logprob(client, prompt, other)
        assert math.isclose(scored["score"], 1 / (1 + math.exp(against - wanted)), rel_tol=1e-3)


@asynchronous
async def test_refusals_and_odds_and_ends(stack: LocalStack, tmp_path: Path) -> None:
    """Typed refusals; ids in bodies; /invocations by the body's fields; aliases; /tokenizer_info only where it is enabled."""
    changes = {"model_aliases": ("gpt-4o",), "enable_tokenizer_info_endpoint": True, "score_tokens": "yes,no"}
    path = tmp_path / "score.jinja"
    path.write_text(TEMPLATE)
    async with (
        gateway(stack.scheduler_address, **changes, score_template=path) as running,
        gateway(stack.scheduler_address) as plain,
        client_of(running) as client,
        client_of(plain) as other,
    ):
        refused = {
            ("/classify", json.dumps({"input": "a"})): "task_unsupported",
            ("/score", json.dumps({"text_1": "a"})): "invalid_field",
            ("/score", json.dumps({"text_1": ["a", "b"], "text_2": ["a", "b", "c"]})): "invalid_field",
            ("/rerank", json.dumps({"query": "a", "documents": []})): "invalid_field",
            (
                "/rerank",
                json.dumps({"query": "a", "documents": ["b"], "truncate_prompt_tokens": 3}),
            ): "unsupported_field",
            ("/pooling", json.dumps({"input": "a", "task": "token_embed"})): "unsupported_field",
            ("/generative_scoring", json.dumps({"query": "a", "items": ["b"], "label_token_ids": []})): "invalid_field",
            ("/score", json.dumps({"text_1": "a", "text_2": "b"})): "score_tokens",
            ("/invocations", json.dumps({"model": "tiny"})): "invalid_field",
        }
        for (route, body), code in refused.items():
            answer = await client.post(route, content=body, headers={"content-type": "application/json"})
            assert (answer.status_code in (400, 409), answer.json()["error"]["code"]) == (True, code), answer.text
        assert (
            (await other.get("/tokenizer_info")).json()["error"]["message"].endswith("--enable-tokenizer-info-endpoint")
        )
        shown = (await client.get("/tokenizer_info")).json()
        assert shown["eos_token"] and "messages" in shown["chat_template"] and shown["model_max_length"] == 2048
        assert [model["id"] for model in (await client.get("/v1/models")).json()["data"]] == ["tiny", "gpt-4o"]
        asked = {"model": "gpt-4o", "prompt": "x", "max_tokens": 1, "request_id": "mine"}
        answer = await client.post("/invocations", json=asked)
        assert (answer.json()["id"], answer.json()["model"]) == ("cmpl-mine", "tiny")
        assert answer.headers["x-request-id"] == "mine"
        headed = await client.post("/v1/completions", json=asked, headers={"x-request-id": "header"})
        assert headed.json()["id"] == "cmpl-header"
        kinds = {"messages": [{"role": "user", "content": "x"}], "input": "x", "prompt": "x"}
        bodies = [{name: value, "max_tokens": 1} for name, value in kinds.items()]
        objects = [(await post(client, "/invocations", **body))["object"] for body in bodies]
        assert objects == ["chat.completion", "list", "text_completion"]
        ranked = await post(other, "/invocations", query=QUERY, documents=DOCUMENTS)
        assert len(ranked["results"]) == 3


@asynchronous
async def test_a_template_that_cannot_be_used(tmp_path: Path) -> None:
    """The gateway does not start."""
    (tmp_path / "bad.jinja").write_text("{% if %}")
    for name in ("bad.jinja", "none.jinja"):
        with pytest.raises(ConfigError, match=f"--score-template: .*{name} cannot be used"):
            async with gateway("127.0.0.1:1", score_template=tmp_path / name):
                pass
