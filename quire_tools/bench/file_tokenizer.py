"""Prompts of exact lengths from a `tokenizer.json`. Needs the package tokenizers (the gateway's and the worker's extra)."""

from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer


@dataclass(slots=True, frozen=True)
class FileTokenizer:
    """A `tokenizer.json`, used without adding special tokens."""

    inner: Tokenizer

    def encode(self, text: str) -> list[int]:
        """Token ids of the text."""
        return list(self.inner.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: list[int]) -> str:
        """Text of the ids."""
        return str(self.inner.decode(ids))


def tokenizer_at(path: Path) -> FileTokenizer:
    """The tokenizer in a file or in a checkpoint's folder. Raises FileNotFoundError ("there is no ...")."""
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(f"there is no {file}")
    return FileTokenizer(Tokenizer.from_file(str(file)))
