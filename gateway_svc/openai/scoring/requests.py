"""Bodies of the scoring routes, and their answers, in vLLM's, Jina's and Cohere's forms. Pure.

Unknown fields are accepted; known ones that would change a score and are not supported are refused.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from gateway_svc.http.json_body import I32, U32, Ids, Texts, parse_body
from gateway_svc.openai.embeddings import EmbeddingRequest
from svc_common.errors import InvalidArgument

MAX_TEXTS = 1_024
"""Pairs of texts in one request."""
PAIRS = (("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents"), ("queries", "items"))
_PLAIN = "send plain texts"


class ScoringFields(BaseModel):
    """Fields of all. `pooling`: as of /v1/embeddings."""

    model_config = ConfigDict(strict=True, extra="ignore")
    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {
        "truncate_prompt_tokens": (),
        "max_tokens_per_doc": (),
        "max_chunks_per_doc": (),
        "rank_fields": ([],),
        "activation": (True,),
        "use_activation": (True,),
        "softmax": (True,),
        "instruction": ("",),
    }

    model: str = ""
    priority: I32 | None = None
    pooling: Literal["mean", "last"] | None = None
    request_id: str | None = None


class ScoreRequest(ScoringFields):
    """/score: one text with each of several, or as many with as many, under any of vLLM's names for the two."""

    text_1: str | Texts | None = None
    text_2: str | Texts | None = None
    data_1: str | Texts | None = None
    data_2: str | Texts | None = None
    queries: str | Texts | None = None
    documents: str | Texts | None = None
    items: str | Texts | None = None

    @classmethod
    def parse(cls, body: bytes) -> "ScoreRequest":
        """Parse the body; raises InvalidArgument if it is invalid."""
        return parse_body(cls, body, cls.NEUTRAL)[0]

    def pairs(self) -> list[tuple[str, str]]:
        """The texts to score. Raises InvalidArgument for missing texts, and for numbers of texts that do not match."""
        given = [(first, second) for first, second in PAIRS if getattr(self, first) and getattr(self, second)]
        if len(given) != 1:
            raise InvalidArgument.field("text_1", "and text_2 are needed, or queries and documents; and no other texts")
        first, second = (_listed(getattr(self, name)) for name in given[0])
        if len(first) not in (1, len(second)):
            raise InvalidArgument.field(
                given[0][0], f"has {len(first)} texts and {given[0][1]} {len(second)}; send one, or as many"
            )
        return checked(
            [(first[0] if len(first) == 1 else first[i], text) for i, text in enumerate(second)], given[0][1]
        )


class RankedText(BaseModel):
    """A document as an object."""

    model_config = ConfigDict(strict=True, extra="ignore")

    text: str


class RerankRequest(ScoringFields):
    """/rerank: documents by their relevance to a query. `top_n`: 0 = all."""

    query: str
    documents: Annotated[list[str | RankedText], Field(fail_fast=True)]
    top_n: U32 | None = None
    return_documents: bool | None = None

    @classmethod
    def parse(cls, body: bytes) -> "RerankRequest":
        """Parse the body; raises InvalidArgument if it is invalid."""
        return parse_body(cls, body, cls.NEUTRAL)[0]

    def pairs(self) -> list[tuple[str, str]]:
        """The texts to score."""
        return checked([(self.query, text) for text in self._texts], "documents")

    @property
    def _texts(self) -> list[str]:
        return [document if isinstance(document, str) else document.text for document in self.documents]

    def results(self, scores: Sequence[float]) -> list[dict[str, Any]]:
        """The best documents, best first; of equal ones the first."""
        best = sorted(range(len(scores)), key=lambda i: -scores[i])[: self.top_n or None]
        shown = self.return_documents is not False
        return [
            {"index": i, **({"document": {"text": self._texts[i]}} if shown else {}), "relevance_score": scores[i]}
            for i in best
        ]


class LabelsRequest(ScoringFields):
    """/generative_scoring: the probability of a label token after each item. See vLLM's GenerativeScoringRequest."""

    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {"pooling": ()}

    query: str | Ids
    items: Texts | Annotated[list[Ids], Field(fail_fast=True)]
    label_token_ids: Ids
    apply_softmax: bool = True
    item_first: bool = False
    add_special_tokens: bool = True

    @classmethod
    def parse(cls, body: bytes) -> "LabelsRequest":
        """Parse the body; raises InvalidArgument if it is invalid."""
        made = parse_body(cls, body, cls.NEUTRAL)[0]
        if not made.label_token_ids:
            raise InvalidArgument.field("label_token_ids", "is empty; send the id of at least one token")
        checked([("", "")] * len(made.items) * len(made.label_token_ids), "items")
        return made


class PoolingRequest(EmbeddingRequest):
    """/pooling: a vector of each input, of vLLM's tasks only `embed`."""

    task: str | None = None

    @classmethod
    def parse(cls, body: bytes) -> "PoolingRequest":
        """Parse the body; raises InvalidArgument if it is invalid."""
        neutral = {"task": ("embed",), "messages": (), "truncate_prompt_tokens": (), "use_activation": (True,)}
        instead = {"task": "only embed is: one vector for each input", "messages": _PLAIN}
        return parse_body(cls, body, neutral, instead=instead)[0]


def checked(pairs: list[tuple[str, str]], field: str) -> list[tuple[str, str]]:
    """`pairs`; raises InvalidArgument naming `field` for none and for too many."""
    if not 1 <= len(pairs) <= MAX_TEXTS:
        raise InvalidArgument.field(field, f"makes {len(pairs)} pairs of texts; send 1 to {MAX_TEXTS}")
    return pairs


def scores_answer(head: Mapping[str, Any], scores: Sequence[float], num_tokens: int) -> dict[str, Any]:
    """vLLM's ScoreResponse."""
    data = [{"index": i, "object": "score", "score": score} for i, score in enumerate(scores)]
    return {**head, "object": "list", "data": data, "usage": usage(num_tokens)}


def usage(num_tokens: int) -> dict[str, int]:
    """Tokens read."""
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}


def _listed(texts: str | list[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else texts
