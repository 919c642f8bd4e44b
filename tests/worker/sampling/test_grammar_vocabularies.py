"""Structured output on the worker: vocabularies, their sizes, ends and special tokens; tokenizers of other kinds and of no use."""

import random

import pytest
import tokenizers

from quire_tools.simulated_worker import bundle as simulated_bundle
from tests.support.services.models import fallback_tokenizer
from tests.support.worker.grammar_rows import EOS_IDS, VOCAB_SIZE, allowed, choice, ids_of, new_masks, regex
from worker_svc.sampling.grammar_masks import GrammarMasks

SINGLE_BYTES = simulated_bundle.tokenizer_json()


@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE + 100, VOCAB_SIZE + 1, VOCAB_SIZE - 40])
def test_logits_and_tokenizer_of_other_sizes(vocab_size: int) -> None:
    """Logits beyond the tokenizer's tokens are never allowed; tokens beyond the logits are cut off."""
    masks = new_masks(vocab_size=vocab_size)
    masks.add(0, regex("(?s:.){1,4}"), [])
    drafts = ids_of("a")
    lines = allowed(masks, 0, drafts, vocab_size=vocab_size)
    real = new_masks()
    real.add(0, regex("(?s:.){1,4}"), [])
    expected = [ids & set(range(vocab_size)) for ids in allowed(real, 0, drafts)]
    assert lines == expected and all(len(line) > 50 for line in lines)


def test_any_of_several_eos_ids_ends() -> None:
    """The end-of-sequence ids are the model's, not the tokenizer's idea of them."""
    masks = new_masks(eos_ids=[1, 3, 4])
    masks.add(0, choice("a"), ids_of("a"))
    assert allowed(masks, 0) == [{1, 3, 4}]


@pytest.mark.parametrize("kind", ["byte fallback", "single bytes"])
def test_other_tokenizers(kind: str) -> None:
    """SentencePiece's blanks and byte tokens, and a vocabulary of bytes alone: outputs decode to the very choices."""
    texts = {" Hello world!", "日本 é", " lo lo"}
    library = fallback_tokenizer() if kind == "byte fallback" else tokenizers.Tokenizer.from_buffer(SINGLE_BYTES)
    library = tokenizers.Tokenizer.from_str(library.to_str())
    library.add_special_tokens(["<|endoftext|>"])
    eos_id = library.token_to_id("<|endoftext|>")
    # An id that the tokenizer does not have is no end.
    masks = GrammarMasks(library.to_str().encode(), [eos_id, 300], 301)
    found = set()
    for i in range(40):
        masks.add(0, choice(*texts), [])
        drawn: list[int] = []
        while eos_id not in drawn:
            (ids,) = allowed(masks, 0, vocab_size=301)
            drawn.append(random.Random(100 * i + len(drawn)).choice(sorted(ids)))
            masks.accept(0, drawn[-1:])
        masks.remove(0)
        # Behind a word, as an output stands behind its prompt: a first blank stays.
        found.add(library.decode([ord("x"), *drawn[:-1]]).removeprefix("x"))
    assert found == texts


def test_special_tokens_are_no_text() -> None:
    """Free text never allows a special token, although its name would match."""
    masks = new_masks()
    masks.add(0, regex("[^x]{0,40}"), [])
    assert not allowed(masks, 0)[0] & {2, 3, 4}


@pytest.mark.parametrize("tokenizer_json", [b"{}", b"\xff", b'{"model": {"type": "none"}}'])
def test_a_tokenizer_of_no_use_fails_rows_with_grammars_only(tokenizer_json: bytes) -> None:
    """The worker starts; a row that brings a grammar gets masks of zeros."""
    masks = GrammarMasks(tokenizer_json, EOS_IDS, VOCAB_SIZE)
    masks.add(0, regex("a"), [])
    assert allowed(masks, 0) == [set()]


def test_a_model_without_eos_fails_rows_with_grammars_only() -> None:
    """An output could never end."""
    masks = new_masks(eos_ids=[])
    masks.add(0, regex("a"), [])
    assert allowed(masks, 0) == [set()]
