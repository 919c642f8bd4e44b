"""Routes of vLLM's pooling tasks; see docs/openai.md."""

from collections.abc import Sequence
from typing import Any

from starlette.routing import Route

from gateway_svc.calls import Call
from gateway_svc.generating.cell_model import ServedModel
from gateway_svc.generating.embedder import Embedder
from gateway_svc.generating.generator import Generator, wait_for_model
from gateway_svc.generating.model_catalog import ModelCatalog
from gateway_svc.http.endpoint import Doorman, HttpRequest, named
from gateway_svc.http.io import Reply
from gateway_svc.openai.scoring.requests import (
    LabelsRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
    scores_answer,
    usage,
)
from gateway_svc.openai.scoring.scorers import LabelProbabilities, Scorer, tokens_of
from svc_common.clock import NS_PER_S, wall_ns
from svc_common.errors import InvalidArgument


class ScoringRoutes:
    """Handlers of the routes."""

    def __init__(self, scorer: Scorer, generator: Generator, embedder: Embedder, catalog: ModelCatalog) -> None:
        self._scorer, self._embedder, self._catalog = scorer, embedder, catalog
        self._labels = LabelProbabilities(generator)

    def routes(self, door: Doorman) -> Sequence[Route]:
        """All paths that vLLM, Jina and Cohere have for them."""
        handlers = {
            self.score: ("/score", "/v1/score"),
            self.rerank: ("/rerank", "/v1/rerank", "/v2/rerank"),
            self.labels: ("/generative_scoring",),
            self.pooling: ("/pooling",),
            self.classify: ("/classify",),
        }
        return [door.route("POST", path, handler) for handler, paths in handlers.items() for path in paths]

    async def score(self, http: HttpRequest, call: Call, reply: Reply) -> None:
        """Answer with the score of each pair of texts."""
        request = ScoreRequest.parse(http.body)
        call = named(call, request.request_id, reply)
        scores = await self._scorer.score(call, request, request.pairs())
        await reply.json(scores_answer(_head("score", call, scores.model), scores.values, scores.num_tokens))

    async def rerank(self, http: HttpRequest, call: Call, reply: Reply) -> None:
        """Answer with the documents, most relevant first."""
        request = RerankRequest.parse(http.body)
        call = named(call, request.request_id, reply)
        scores = await self._scorer.score(call, request, request.pairs())
        results = request.results(scores.values)
        head = {"id": f"rerank-{call.request_id}", "model": scores.model}
        await reply.json({**head, "usage": usage(scores.num_tokens), "results": results})

    async def labels(self, http: HttpRequest, call: Call, reply: Reply) -> None:
        """Answer with the probability of the first label token after each item."""
        request = LabelsRequest.parse(http.body)
        call = named(call, request.request_id, reply)
        model = await wait_for_model(self._catalog, call, request.model)
        query = await _tokens(model, request.query, special_tokens=request.add_special_tokens)
        items = [await _tokens(model, item, special_tokens=False) for item in request.items]
        prompts = [item + query if request.item_first else query + item for item in items]
        values = await self._labels.of(call, request, prompts, request.label_token_ids, softmax=request.apply_softmax)
        head = _head("generative-scoring", call, model.name)
        await reply.json(scores_answer(head, values, sum(map(len, prompts))))

    async def pooling(self, http: HttpRequest, call: Call, reply: Reply) -> None:
        """Answer with a vector for each input."""
        request = PoolingRequest.parse(http.body)
        call = named(call, request.request_id, reply)
        answer = request.answer(await self._embedder.embed(call, request.message()))
        data = [{"index": each["index"], "object": "pooling", "data": each["embedding"]} for each in answer["data"]]
        await reply.json({**_head("pool", call, answer["model"]), **answer, "data": data})

    async def classify(self, http: HttpRequest, call: Call, reply: Reply) -> None:
        """Refuse: no model that a worker serves has a classification head."""
        raise InvalidArgument(
            "workers serve causal language models, which have no classification head; POST /generative_scoring gives the "
            "probability of label tokens",
            reason="TASK_UNSUPPORTED",
        )


async def _tokens(model: ServedModel, given: str | list[int], *, special_tokens: bool) -> list[int]:
    return await tokens_of(model, given, special_tokens=special_tokens) if isinstance(given, str) else given


def _head(kind: str, call: Call, model: str) -> dict[str, Any]:
    return {"id": f"{kind}-{call.request_id}", "created": wall_ns() // NS_PER_S, "model": model}
