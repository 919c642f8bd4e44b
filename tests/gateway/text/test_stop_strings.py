"""Stop strings over pieces of text, and the tokens that count before them (inference.proto, Choice.token_ids)."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway_svc.text.stop_strings import StopMatcher
from gateway_svc.text.text_stream import Piece, TextStream
from tests.support.services import models

ALPHABET = st.sampled_from("ab")
STOPS = st.lists(st.text(ALPHABET, min_size=1, max_size=5), min_size=1, max_size=4)


def naive(text: str, stops: list[str]) -> tuple[str, int] | None:
    """The first stop to be complete; of those that end together the longest. Returns it and its end."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return max(ending, key=len), end
    return None


def cut(text: str, points: list[int]) -> list[str]:
    edges = [0, *sorted(min(p, len(text)) for p in points), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(edges)]


@given(st.text(ALPHABET, max_size=30), STOPS, st.lists(st.integers(0, 30), max_size=6))
def test_a_match_does_not_depend_on_how_the_text_is_cut(text: str, stops: list[str], points: list[int]) -> None:
    """Against a naive search over the whole text, for any cuts."""
    matcher, fed = StopMatcher(stops), 0
    found = None
    for part in cut(text, points):
        match = matcher.feed(part)
        if match is not None:
            found = (match.stop, fed + match.end)
            break
        fed += len(part)
    assert found == naive(text, stops)


@given(st.text(ALPHABET, max_size=20), STOPS)
def test_held_characters_are_exactly_the_longest_possible_beginning(text: str, stops: list[str]) -> None:
    """Nothing is held back that cannot begin a stop string, and everything that can."""
    matcher = StopMatcher(stops)
    if matcher.feed(text) is None:
        possible = [
            n
            for n in range(len(text) + 1)
            if any(stop.startswith(text[len(text) - n :]) and n < len(stop) for stop in stops)
        ]
        assert matcher.num_held == max(possible)


def run(ids: list[int], stops: list[str], batches: list[int], *, min_tokens: int = 0) -> tuple[str, list[int], Piece]:
    """Feeds tokens in batches; text, tokens and the last piece."""
    stream = TextStream(models.tiny(), stops, min_tokens=min_tokens)
    edges = [0, *sorted(min(b, len(ids)) for b in batches), len(ids)]
    pieces = [stream.push(ids[a:b]) for a, b in itertools.pairwise(edges)]
    pieces.append(stream.finish())
    offset = 0
    for piece in pieces:
        assert piece.token_offset == offset
        offset += len(piece.token_ids)
        assert piece.num_output_tokens == offset
    return "".join(p.text for p in pieces), [i for p in pieces for i in p.token_ids], pieces[-1]


SAMPLE = "def main():\n    print('héllo 😀')\n\n\nclass Foo:\n    pass\n"


@pytest.mark.parametrize("stop", ["\n\n", "main", "llo 😀", "😀", "class Foo", ":\n    pass\n", "d"])
def test_text_ends_before_the_stop_at_every_split(stop: str) -> None:
    """However tokens arrive, text ends right before the stop and the tokens are those that made it."""
    ids = models.tiny().encode(SAMPLE)
    expected = SAMPLE[: SAMPLE.index(stop)]
    for split in range(len(ids) + 1):
        text, tokens, last = run(ids, [stop], [split])
        assert text == expected
        assert last.stopped_by == stop
        assert tokens == ids[: len(tokens)]
        # The kept tokens cover the text, and the last of them is needed for it.
        assert models.tiny().decode(tokens).startswith(expected) or "\ufffd" in models.tiny().decode(tokens)
        assert len(models.tiny().decode(tokens[:-1])) <= len(expected)


@given(st.text(st.sampled_from("ab \n😀é"), max_size=25), st.lists(st.integers(0, 60), max_size=5), STOPS)
def test_pieces_together_equal_the_text(text: str, batches: list[int], stops: list[str]) -> None:
    """With or without a match, the text is the full text up to the match, and independent of batching."""
    ids = models.tiny().encode(text)
    found = naive(text, stops)
    expected = text if found is None else text[: found[1] - len(found[0])]
    got, tokens, last = run(ids, stops, batches)
    assert (got, last.stopped_by) == (expected, None if found is None else found[0])
    assert tokens == run(ids, stops, [])[1]


def test_text_that_may_begin_a_stop_is_held_with_its_tokens() -> None:
    """'EN' of 'END' comes only when it turns out to be something else, with its tokens."""
    encode = models.tiny().encode
    stream = TextStream(models.tiny(), ["END"])
    first = stream.push(encode("x E"))
    assert first.text in {"x", "x "}
    assert models.tiny().decode(first.token_ids) == first.text
    second = stream.push(encode("xit"))
    assert first.text + second.text + stream.finish().text == "x Exit"


def test_min_tokens_come_out_before_any_stop_string() -> None:
    """inference.proto: fewest tokens before any other rule applies."""
    ids = models.tiny().encode("a b a b a b a b")
    for least in range(len(ids) + 1):
        _, tokens, _ = run(ids, ["b"], [], min_tokens=least)
        assert len(tokens) >= least


def test_after_the_stop_nothing_comes() -> None:
    """What the engine made beyond the stop is dropped."""
    stream = TextStream(models.tiny(), ["b"])
    assert stream.push(models.tiny().encode("a b")).stopped_by == "b"
    later = stream.push(models.tiny().encode("more"))
    assert (later.text, later.token_ids) == ("", [])
    assert stream.finish().text == ""


def test_a_stop_token_counts_and_shows_no_text() -> None:
    """The token that ended the sequence is among the tokens; its text is not."""
    ids = models.tiny().encode("one two")
    stream = TextStream(models.tiny())
    piece = stream.push(ids, ends_with_stop_token=True)
    assert piece.token_ids == ids
    assert piece.text == models.tiny().decode(ids[:-1])
