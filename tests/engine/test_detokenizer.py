from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cluster.engine.detokenizer import Detokenizer
from tests.tiny import byte_tokenizer

TOKENIZER = byte_tokenizer()


@given(st.text(max_size=30))
def test_pieces_add_up_to_the_text(text):
    detokenizer = Detokenizer(TOKENIZER)
    shown = ""
    for token in TOKENIZER.encode(text):
        assert not detokenizer.push(token)
        shown += detokenizer.take_new()
        assert "�" not in shown or "�" in text
    detokenizer.finish()
    assert shown + detokenizer.take_new() == detokenizer.text == text


@given(st.text("ab€", max_size=20), st.lists(st.text("ab€", min_size=1, max_size=4), min_size=1, max_size=3))
def test_text_ends_where_the_first_stop_string_begins(text, stops):
    detokenizer = Detokenizer(TOKENIZER, stops)
    shown, stopped = "", False
    for token in TOKENIZER.encode(text):
        stopped = detokenizer.push(token)
        shown += detokenizer.take_new()
        assert not any(s in shown for s in stops)
        if stopped:
            break
    detokenizer.finish()
    shown += detokenizer.take_new()
    ends = [text.find(s) + len(s) for s in stops if s in text]
    assert stopped == bool(ends)
    if ends:  # of the stop strings complete at the first possible moment, the one that begins first
        first = min(ends)
        expected = min(text.rfind(s, 0, first) for s in stops if text[:first].endswith(s))
        assert shown == detokenizer.text == text[:expected]
    else:
        assert shown == text


def test_special_tokens_are_not_text_and_broken_characters_come_last():
    detokenizer = Detokenizer(TOKENIZER)
    ids = [*TOKENIZER.encode("a"), 256, TOKENIZER.encode("€")[0]]
    for token in ids:
        detokenizer.push(token)
    assert detokenizer.take_new() == "a"
    detokenizer.finish()
    assert detokenizer.take_new() == "�"
