"""How relevant two texts are to each other: by vectors, or by the probability of a label token after a prompt of both.

Which one a gateway uses is set at its start: a decoder does not say what it was trained for.
"""

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from gateway_svc.calls import Call
from gateway_svc.generating.cell_model import ServedModel
from gateway_svc.generating.embedder import Embedder
from gateway_svc.generating.generator import Generator, off_loop_if_long, wait_for_model
from gateway_svc.generating.model_catalog import ModelCatalog
from gateway_svc.openai.embeddings import POOLINGS
from gateway_svc.openai.generations import merged
from gateway_svc.openai.scoring.requests import ScoringFields
from gateway_svc.text.chat_template import ChatTemplate
from gateway_svc.text.text_model import TextModel
from protos.inference.v1 import inference_pb2 as pb
from svc_common.errors import FailedPrecondition

Pairs = Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Scores:
    """One score for each pair, and the tokens read for them. `model`: the served name."""

    model: str
    values: list[float]
    num_tokens: int


class Scorer(Protocol):
    """Scores pairs of texts."""

    async def score(self, call: Call, request: ScoringFields, pairs: Pairs) -> Scores:
        """The score of each pair. Raises the typed errors of embeddings or generations."""


class VectorScorer:
    """Cosine of the texts' vectors, as of a bi-encoder; each text is read once."""

    def __init__(self, embedder: Embedder) -> None:
        self._embedder = embedder

    async def score(self, call: Call, request: ScoringFields, pairs: Pairs) -> Scores:
        """See Scorer."""
        texts = list(dict.fromkeys(text for pair in pairs for text in pair))
        message = pb.EmbedRequest(
            model=request.model,
            pooling=POOLINGS[request.pooling],
            inputs=[pb.EmbedInput(text=text) for text in texts],
            scheduling=pb.Scheduling(priority=request.priority),
        )
        answer = await self._embedder.embed(call, message)
        vectors = {text: np.asarray(made.values) for text, made in zip(texts, answer.embeddings, strict=True)}
        values = [float(vectors[first] @ vectors[second]) for first, second in pairs]
        return Scores(answer.model, values, answer.usage.prompt_tokens)


class LabelScorer:
    """Probability of the first of some label tokens among them, as of a decoder that was trained to answer yes or no.

    `template`: makes the prompt of a pair from messages of the roles query and document, as vLLM's score templates do; `labels`:
    texts of one token each.
    """

    def __init__(self, generator: Generator, catalog: ModelCatalog, template: str, labels: Sequence[str]) -> None:
        self._probabilities = LabelProbabilities(generator)
        self._catalog, self._labels = catalog, labels
        self._template = ChatTemplate(template, {})

    async def score(self, call: Call, request: ScoringFields, pairs: Pairs) -> Scores:
        """See Scorer. Raises FailedPrecondition if a label is not one token of the served model."""
        model = await wait_for_model(self._catalog, call, request.model)
        labels = [_only_token(model.text, label) for label in self._labels]
        prompts = [await tokens_of(model, self._prompt(*pair), special_tokens=False) for pair in pairs]
        values = await self._probabilities.of(call, request, prompts, labels, softmax=True)
        return Scores(model.name, values, sum(map(len, prompts)))

    def _prompt(self, query: str, document: str) -> str:
        messages = [{"role": "query", "content": query}, {"role": "document", "content": document}]
        return self._template.render(messages)


class LabelProbabilities:
    """Probability of label tokens at the position after a prompt. Each label is one request of one token, allowed no other.

    Log probabilities are of the unmodified distribution, so each is the label's own; equal prompts share the prefix cache.
    """

    def __init__(self, generator: Generator) -> None:
        self._generator = generator

    async def of(
        self, call: Call, request: ScoringFields, prompts: Sequence[list[int]], labels: Sequence[int], *, softmax: bool
    ) -> list[float]:
        """The first label's probability after each prompt: among the labels, or without `softmax` among all tokens."""
        messages = [_message(request, prompt, label) for prompt in prompts for label in labels]
        logprobs = await self._first_logprobs(call, messages)
        rows = [logprobs[i : i + len(labels)] for i in range(0, len(logprobs), len(labels))]
        return [_softmax(row) if softmax else math.exp(row[0]) for row in rows]

    async def _first_logprobs(self, call: Call, messages: Sequence[pb.GenerateRequest]) -> list[float]:
        found = [-math.inf] * len(messages)
        async with contextlib.AsyncExitStack() as stack:
            parts = [replace(call, request_id=f"{call.request_id}-{i}") for i in range(len(messages))]
            generations = [
                await stack.enter_async_context(self._generator.generate(part, message))
                for part, message in zip(parts, messages, strict=True)
            ]
            async with contextlib.aclosing(merged(generations)) as events_of:
                async for index, events in events_of:
                    for event in events:
                        if isinstance(event, pb.Delta) and event.logprobs:
                            found[index] = event.logprobs[0]
        return found


def _message(request: ScoringFields, prompt: list[int], label: int) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        model=request.model,
        token_ids=pb.TokenIds(ids=prompt),
        sampling=pb.SamplingParams(temperature=0, allowed_token_ids=[label]),
        stop=pb.StopConditions(max_tokens=1, ignore_eos=True),
        response=pb.ResponseOptions(logprobs=True),
        scheduling=pb.Scheduling(priority=request.priority),
    )


def _softmax(logprobs: Sequence[float]) -> float:
    """The first one's share."""
    return 1 / math.fsum(math.exp(min(logprob - logprobs[0], 700.0)) for logprob in logprobs)


async def tokens_of(model: ServedModel, text: str, *, special_tokens: bool) -> list[int]:
    """Token ids of `text`."""
    return await off_loop_if_long(len(text), lambda t: model.text.encode(t, add_special_tokens=special_tokens), text)


def _only_token(text_model: TextModel, label: str) -> int:
    token_ids = text_model.encode(label, add_special_tokens=False)
    if len(token_ids) != 1:
        raise FailedPrecondition(
            f"--score-tokens: {label!r} is {len(token_ids)} tokens of this model, not one; choose texts that are one token",
            reason="SCORE_TOKENS",
        )
    return token_ids[0]
