"""Streamed text: whole characters only, and stop strings cut exactly, whatever the token boundaries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st

from driver.text import Detokenizer, StopFilter, TextStream
from driver.tokenizer import Tokenizer
from tests.models import END_ID, make_byte_tokenizer

Decode = Callable[[Sequence[int]], str]

REPLACEMENT = "\ufffd"
SAMPLES = (
    "plain ascii",
    "emoji 🙂🙃👩‍👩‍👧‍👦🇩🇪 end",
    "日本語のテキスト、漢字。",
    "مرحبا بالعالم",
    "é combining e\u0301 ✓ \U0010ffff",
    "\u0000\t\n\r\u00a0\u200b",
)


@pytest.fixture(scope="module")
def decode(tmp_path_factory: pytest.TempPathFactory) -> Decode:
    return Tokenizer(make_byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))).decode


@pytest.fixture(scope="module")
def piece_decode(tmp_path_factory: pytest.TempPathFactory) -> Decode:
    """Decodes as SentencePiece models do: bytes for the unknown, and the first space of a text is dropped.

    Ids below 256 are bytes, 256 is a space, 257 on are the words below.
    """
    decoders = tokenizers.decoders
    pieces = [*(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁the", "the", "▁sea", "s", "<unk>"]
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE({piece: at for at, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    folder: Path = tmp_path_factory.mktemp("pieces")
    backend.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder).decode


def pieces_of(decode: Decode, ids: Sequence[int]) -> list[str]:
    """The pieces of each push, and of the flush as the last."""
    detokenizer = Detokenizer(decode)
    return [detokenizer.push(token_id) for token_id in ids] + [detokenizer.flush()]


def streamed(decode: Decode, ids: Sequence[int], stops: Sequence[str]) -> tuple[str, str | None]:
    """What a client gets, and the stop string found; stops where the engine would."""
    stream = TextStream(decode, stops)
    text = ""
    for token_id in ids:
        text += stream.push(token_id)
        if stream.stop is not None:
            break
    return text + stream.finish(), stream.stop


# ---- characters


@pytest.mark.parametrize("text", SAMPLES)
def test_no_half_character_leaves(decode: Decode, text: str) -> None:
    pieces = pieces_of(decode, list(text.encode()))
    assert not any(REPLACEMENT in piece for piece in pieces)
    assert "".join(pieces) == text
    assert pieces[-1] == ""


@pytest.mark.parametrize("text", SAMPLES)
def test_each_character_leaves_with_its_last_byte(decode: Decode, text: str) -> None:
    pieces = pieces_of(decode, list(text.encode()))
    at = 0
    for character in text:
        size = len(character.encode())
        assert pieces[at : at + size] == [""] * (size - 1) + [character]
        at += size


@pytest.mark.parametrize(("whole", "part"), [("a", "é"), ("é", "日"), ("日", "🙂"), ("", "🙂")])
def test_text_that_ends_inside_a_character_ends_in_one_replacement(decode: Decode, whole: str, part: str) -> None:
    for cut in range(1, len(part.encode())):
        pieces = pieces_of(decode, list((whole.encode() + part.encode())[: len(whole.encode()) + cut]))
        assert "".join(pieces[:-1]) == whole
        assert pieces[-1] == REPLACEMENT


@pytest.mark.parametrize("text", ["a\ufffdb", "\ufffd", "\ufffd" * 100 + "x", "x" + "\ufffd" * 100, "\ufffd日\ufffd"])
def test_a_replacement_character_that_was_written_survives(decode: Decode, text: str) -> None:
    assert "".join(pieces_of(decode, list(text.encode()))) == text


def test_a_stream_of_nothing_flushes_nothing(decode: Decode) -> None:
    assert pieces_of(decode, []) == [""]


def test_a_flushed_detokenizer_begins_anew(decode: Decode) -> None:
    detokenizer = Detokenizer(decode)
    assert detokenizer.push(0xE6) == ""
    assert detokenizer.flush() == REPLACEMENT
    assert detokenizer.push(ord("a")) == "a"
    assert detokenizer.flush() == ""


@settings(deadline=None, max_examples=300)
@given(ids=st.lists(st.integers(0, 300) | st.sampled_from([0xF0, 0x9F, 0x99, 0x82, 0xE6, 0xFF, END_ID]), max_size=40))
@example(ids=[0xF0, 0x9F, END_ID, 0x99, 0x82])
@example(ids=[300] * 10 + [0xE6, 300, 0x97, 0xA5])
def test_pieces_join_to_the_text_of_all_ids(decode: Decode, ids: list[int]) -> None:
    assert "".join(pieces_of(decode, ids)) == decode(ids)


def test_a_character_after_many_broken_ones_is_whole(decode: Decode) -> None:
    for broken in (1, 62, 63, 64, 65, 66, 200):
        ids = [0xFF] * broken + list("€🙂".encode())
        assert "".join(pieces_of(decode, ids)) == decode(ids), broken


@settings(deadline=None)
@given(ids=st.lists(st.integers(256, 260) | st.sampled_from([*map(ord, "ab ")]), max_size=20))
@example(ids=[256, 256, 258, 257, 256])
def test_spaces_between_pieces_are_kept_although_the_first_is_dropped(piece_decode: Decode, ids: list[int]) -> None:
    assert "".join(pieces_of(piece_decode, ids)) == piece_decode(ids)


@pytest.mark.parametrize("text", SAMPLES)
def test_characters_of_single_byte_pieces_are_whole(piece_decode: Decode, text: str) -> None:
    ids = [257, 256, *text.encode(), 259]
    pieces = pieces_of(piece_decode, ids)
    assert not any(REPLACEMENT in piece for piece in pieces)
    assert "".join(pieces) == piece_decode(ids) == f"the {text} sea"


def test_each_token_costs_only_a_window(decode: Decode) -> None:
    sizes = []

    def counting(ids: Sequence[int]) -> str:
        sizes.append(len(ids))
        return decode(ids)

    pieces_of(counting, list("日本語 text".encode()) * 50)
    assert max(sizes) <= 8


# ---- stop strings

TEXT = "ab abc. abab ca🙂c\n\nUser: a"
STOPS = sorted({TEXT[at : at + size] for size in (2, 3, 4) for at in range(len(TEXT) - size + 1)})


@pytest.mark.parametrize("stop", STOPS)
def test_text_ends_before_the_stop_string(decode: Decode, stop: str) -> None:
    assert streamed(decode, list(TEXT.encode()), [stop]) == (TEXT.split(stop)[0], stop)


@settings(deadline=None, max_examples=200)
@given(st.sampled_from(STOPS), st.lists(st.integers(1, 6), min_size=len(TEXT), max_size=len(TEXT)))
def test_stop_string_is_cut_whatever_the_pieces(stop: str, sizes: list[int]) -> None:
    text, released = TEXT, ""
    held = StopFilter([stop])
    for size in sizes:
        released += held.push(text[:size])
        text = text[size:]
        assert TEXT.split(stop)[0].startswith(released), "part of the stop string has leaked"
        if held.matched:
            break
    assert released == TEXT.split(stop)[0]
    assert held.matched == stop
    assert held.flush() == ""


def test_only_a_possible_stop_is_held_back() -> None:
    held = StopFilter(["STOP"])
    assert held.push("go on") == "go on"
    assert held.push(" S") == " "
    assert held.push("T") == ""
    assert held.push("ART") == "START"
    assert held.push("STOSTO") == "STO"
    assert held.push("x") == "STOx"
    assert held.push("ST") == ""
    assert held.flush() == "ST"
    assert held.matched is None


def test_the_earliest_stop_wins() -> None:
    for stops in (["world", "lo"], ["lo", "world"]):
        held = StopFilter(stops)
        assert held.push("hello world") == "hel"
        assert held.matched == "lo"


def test_a_stop_inside_the_beginning_of_another_is_found() -> None:
    held = StopFilter(["</think>", "think!"])
    assert [held.push(piece) for piece in ("a</thi", "nk", "!")] == ["a", "", "</"]
    assert held.matched == "think!"


@settings(deadline=None, max_examples=300)
@given(
    st.text("abc", max_size=12),
    st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3, unique=True),
    st.lists(st.integers(1, 4), min_size=12, max_size=12),
)
@example("abc", ["abc", "b"], [3] * 12)
def test_several_stops_end_a_text_alike_whatever_the_pieces(text: str, stops: list[str], sizes: list[int]) -> None:
    def run(pieces: list[str]) -> tuple[str, str | None]:
        held, released = StopFilter(stops), ""
        for piece in pieces:
            released += held.push(piece)
            if held.matched:
                return released, held.matched
        return released + held.flush(), None

    pieces, rest = [], text
    for size in sizes:
        pieces.append(rest[:size])
        rest = rest[size:]
    released, matched = run(list(text))
    assert run(pieces) == (released, matched)
    if matched is None:
        assert released == text
        assert not any(stop in text for stop in stops)
    else:
        assert text.startswith(released + matched)
        assert not any(stop in released for stop in stops)


def test_without_stops_nothing_is_held() -> None:
    held = StopFilter([])
    assert held.push("abc") == "abc"
    assert held.flush() == ""


def test_a_stop_that_the_flush_completes_is_cut(decode: Decode) -> None:
    ids = [*b"ok ", 0xE6]  # ends inside a character, whose replacement is the stop string
    assert streamed(decode, ids, [REPLACEMENT]) == ("ok ", REPLACEMENT)
    assert streamed(decode, ids, [" " + REPLACEMENT]) == ("ok", " " + REPLACEMENT)
    assert streamed(decode, ids, [" " + REPLACEMENT + "!"]) == ("ok " + REPLACEMENT, None)


def test_a_stop_of_many_bytes_is_found(decode: Decode) -> None:
    text = "日本🙂語"
    assert streamed(decode, list(text.encode()), ["🙂語"]) == ("日本", "🙂語")


def test_the_end_gives_what_was_held_once(decode: Decode) -> None:
    stream = TextStream(decode, ["STOP"])
    assert "".join(stream.push(byte) for byte in b"a STO") == "a "
    assert stream.finish() == "STO"
    assert stream.stop is None


def test_without_a_tokenizer_there_is_no_text() -> None:
    stream = TextStream(None, [])
    assert (stream.push(5), stream.finish(), stream.stop) == ("", "", None)


def test_stop_strings_count_only_behind_the_first_tokens(decode: Decode) -> None:
    ids = list(b"one, two, three, four")
    for fewest, text in ((0, "one"), (3, "one"), (4, "one, two"), (9, "one, two, three"), (99, bytes(ids).decode())):
        stream = TextStream(decode, [","], fewest)
        pieces = []
        for token_id in ids:
            pieces.append(stream.push(token_id))
            if stream.stop is not None:
                break
        assert "".join(pieces) + stream.finish() == text
        assert (stream.stop is None) == (fewest == 99)
