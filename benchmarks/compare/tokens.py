"""The tokenizer of the compared models: byte-level BPE with real merges and as many tokens as the model has.

Peers read it in their own formats (tokenizer.json, GGUF). Each token is text, so that detokenising has a
realistic cost.
"""

import itertools
from collections.abc import Iterator

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from benchmarks.compare.shapes import NUM_SPECIAL

SPECIAL = ("<|end|>", "<|begin|>")
assert len(SPECIAL) == NUM_SPECIAL
_LETTERS = "etaoinshrdlucmfwypvbgkjqxz"


def _merges() -> Iterator[tuple[str, str]]:
    """Merge pairs, each after the merges that make its parts: two letters, three, four."""
    pairs = [a + b for a, b in itertools.product(_LETTERS, repeat=2)]
    yield from itertools.product(_LETTERS, repeat=2)
    yield from itertools.product(pairs, _LETTERS)
    yield from itertools.product(pairs, pairs)


def vocabulary(size: int) -> tuple[list[str], list[tuple[str, str]]]:
    """`size` tokens by id (special ones, bytes, merges), and the merges, best first. ValueError for an impossible size."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    num_merges = size - NUM_SPECIAL - len(alphabet)
    if num_merges < 1:
        raise ValueError(f"a vocabulary of {size} has no room for {NUM_SPECIAL + len(alphabet)} tokens and a merge")
    merges = list(itertools.islice(_merges(), num_merges))
    if len(merges) < num_merges:
        raise ValueError(f"a vocabulary of {size} is more than {size - num_merges + len(merges)} tokens")
    return [*SPECIAL, *alphabet, *(a + b for a, b in merges)], merges


def tokenizer(size: int) -> Tokenizer:
    """The tokenizer with `size` tokens; see `vocabulary`."""
    names, merges = vocabulary(size)
    made = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(list(SPECIAL))
    return made
