"""Prompts of exact lengths from the tokenizer of a running gateway; needs no files on this machine."""

from dataclasses import dataclass

from quire.client.sync_client import Client


@dataclass(slots=True, frozen=True)
class ServedTokenizer:
    """The tokenizer of a model that a gateway serves."""

    client: Client
    model: str = ""

    def encode(self, text: str) -> list[int]:
        """Token ids of the text, including the special ones that the tokenizer adds."""
        return self.client.tokenize(text, self.model)

    def decode(self, ids: list[int]) -> str:
        """Text of the ids."""
        return self.client.detokenize(ids, self.model)
