"""What a text model keeps of the texts that it has seen is bounded, whatever clients send."""

import ctypes
from collections.abc import Callable, Iterator

import pytest
import tokenizers

from gateway_svc.text.text_model import MAX_CACHED_WORDS, TextModel
from quire_tools.simulated_worker import bundle as simulated_bundle
from tests.support.services import models

MIB = 2**20
MAX_MIB = 9.0
_C = ctypes.CDLL(None)


class _Heap(ctypes.Structure):
    """`struct mallinfo2` of glibc; `used`: bytes in use, the tokenizer's among them, Python's own small objects not."""

    _fields_ = (("_before", ctypes.c_size_t * 7), ("used", ctypes.c_size_t), ("_behind", ctypes.c_size_t * 2))


def _used_mib() -> float:
    _C.mallinfo2.restype = _Heap
    return float(_C.mallinfo2().used) / MIB


def _simulated() -> TextModel:
    return TextModel(tokenizers.Tokenizer.from_str(simulated_bundle.tokenizer_json().decode()))


def _tiny() -> TextModel:
    return TextModel.from_bundle(models.tiny_bundle())


def _words(start: int, count: int) -> Iterator[str]:
    """Distinct single words, as long as the tokenizer remembers any, of letters that no merge joins."""
    letters = str.maketrans("0123456789", "XQZJKVWYHG")
    return (f"{number:06d}".translate(letters) * 42 for number in range(start, start + count))


@pytest.mark.skipif(not hasattr(_C, "mallinfo2"), reason="counts bytes with glibc's own accounting")
@pytest.mark.parametrize("make", [_simulated, _tiny], ids=["whole prompts", "words"])
def test_distinct_texts_stop_taking_memory(make: Callable[[], TextModel]) -> None:
    """The tokens of the first words are remembered, at 8 KiB each at most; three times as many more add nothing."""
    model = make()
    model.encode("warm")
    empty = _used_mib()
    for text in _words(0, MAX_CACHED_WORDS):
        model.encode(text)
    full = _used_mib()
    for text in _words(MAX_CACHED_WORDS, 3 * MAX_CACHED_WORDS):
        model.encode(text)
    assert 1.0 < full - empty < MAX_MIB
    assert _used_mib() - full < 1.0
