"""Incremental decoding: text is a function of tokens, complete code points only."""

from hypothesis import given
from hypothesis import strategies as st

from gateway_svc.text.detokenizer import TextSegment
from tests.support.services import models

TOKENS = st.lists(st.integers(0, 4095), max_size=60)
TEXTS = st.text(st.characters(codec="utf-8"), max_size=40).filter(lambda text: "<|" not in text)
"""Without the texts of special tokens, which are no text of an answer."""


def segments(text_model: models.TextModel, ids: list[int]) -> list[TextSegment]:
    detokenizer = text_model.detokenizer()
    found = [detokenizer.push(token_id) for token_id in ids]
    return [segment for segment in [*found, detokenizer.flush()] if segment is not None]


@given(TOKENS)
def test_random_byte_level_tokens_give_the_full_decode(ids: list[int]) -> None:
    """Any tokens at all, invalid UTF-8 and special ones included: pieces together equal the library's decode of the whole."""
    parts = segments(models.tiny(), ids)
    assert "".join(part.text for part in parts) == models.tiny_tokenizer().decode(ids, skip_special_tokens=True)
    assert [token_id for part in parts for token_id in part.token_ids] == ids


@given(TEXTS)
def test_a_segment_of_valid_text_is_never_cut_inside_a_code_point(text: str) -> None:
    """Each segment decodes alone to its own text: no code point is split between two."""
    ids = models.tiny().encode(text)
    parts = segments(models.tiny(), ids)
    assert "".join(part.text for part in parts) == text
    for part in parts:
        assert models.tiny_tokenizer().decode(part.token_ids) == part.text


def test_an_emoji_comes_with_its_last_byte() -> None:
    """Four tokens of one emoji are held back together and come out as one segment."""
    ids = models.tiny().encode("x😀y")
    detokenizer = models.tiny().detokenizer()
    texts = [segment.text if (segment := detokenizer.push(token_id)) else None for token_id in ids]
    assert texts == ["x", None, None, None, "😀", "y"] or [t for t in texts if t is not None] == ["x", "😀", "y"]
    assert "\ufffd" not in "".join(t or "" for t in texts)


@given(TOKENS)
def test_starts_name_the_first_character_of_each_token(ids: list[int]) -> None:
    """`starts` grow, lie within the text, and the tokens before a start make exactly the text before it (valid text)."""
    for part in segments(models.tiny(), ids):
        assert part.starts == sorted(part.starts)
        assert all(0 <= start <= len(part.text) for start in part.starts)
        assert len(part.starts) == len(part.token_ids)


def test_a_silent_token_has_no_text() -> None:
    """A stop token counts as a token and shows no text."""
    ids = models.tiny().encode("end")
    detokenizer = models.tiny().detokenizer()
    assert detokenizer.push(ids[0], silent=True) == TextSegment([ids[0]], [0], "")


@given(st.lists(st.sampled_from(["▁Hello", "▁world", "lo", "é", "!", "日本"]), max_size=20))
def test_metaspace_tokens_give_the_full_decode(pieces: list[str]) -> None:
    """Spaces between words survive although each word alone would lose its own."""
    tokenizer = models.fallback_tokenizer()
    ids = [tokenizer.token_to_id(piece) for piece in pieces]
    assert "".join(part.text for part in segments(models.fallback(), ids)) == tokenizer.decode(ids)


@given(TEXTS)
def test_byte_fallback_holds_back_incomplete_characters(text: str) -> None:
    """Text spelled in bytes comes out whole, and no part of it contains a half character."""
    tokenizer = models.fallback_tokenizer()
    ids = [*text.encode(), tokenizer.token_to_id("!")]
    parts = segments(models.fallback(), ids)
    assert "".join(part.text for part in parts) == tokenizer.decode(ids)
    if "\ufffd" not in text:
        assert all("\ufffd" not in part.text for part in parts)


def test_endless_invalid_bytes_are_not_held_for_ever() -> None:
    """A stream of broken bytes still flows (bounded memory, linear time)."""
    parts = segments(models.fallback(), [0xFF] * 1000)
    assert len(parts) > 10
    assert sum(len(part.token_ids) for part in parts) == 1000
