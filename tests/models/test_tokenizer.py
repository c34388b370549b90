"""The embedded model's tokenizer, and fingerprints."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from cluster.models import EMBEDDED_NAME, ModelError, load_tokenizer, tokenizer_fingerprint

SPECIAL = {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2}


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(EMBEDDED_NAME)


TEXT = st.lists(
    st.one_of(
        st.text(alphabet=st.characters(exclude_categories=["Cs"])),
        st.sampled_from(["  ", "\r\n\t", "1234567890", "½²٣", "can't", " .", "\u200d👩‍🚀", *SPECIAL]),
    )
).map("".join)


# Bytes the model has no token for: they are dropped, as by the model's published tokenizer. Of valid UTF-8
# these are six control characters and the lead bytes of planes 4 to 11, in which no character is assigned.
NO_TOKEN = bytes([0x04, 0x06, 0x13, 0x14, 0x16, 0x1D, 0xF1, 0xF2])


@given(TEXT)
def test_round_trip_is_exact(tokenizer, text):
    expected = text.encode().translate(None, delete=NO_TOKEN).decode(errors="replace")
    assert tokenizer.decode(tokenizer.encode(text)) == expected


@given(TEXT)
def test_no_token_spans_a_digit_and_something_else(tokenizer, text):
    for index in tokenizer.encode(text):
        token = tokenizer.decode([index])
        assert len(token) == 1 or not any(character.isdecimal() for character in token)


def test_known_encodings(tokenizer):
    assert tokenizer.encode("Hello world! 123") == [19556, 905, 17, 216, 33, 34, 35]
    assert tokenizer.encode("  multiple   spaces") == [216, 2701, 256, 5600]


@pytest.mark.parametrize(("token", "index"), SPECIAL.items())
def test_special_tokens_are_one_id_and_skipped(tokenizer, token, index):
    assert tokenizer.encode(token) == [index]
    ids = tokenizer.encode(f"one{token}two")
    assert index in ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "onetwo"


def test_no_bos_is_added(tokenizer):
    assert tokenizer.encode("") == []
    assert tokenizer.encode("a") == tokenizer.encode("a", add_special_tokens=False)


def test_fingerprint_is_the_same_in_another_process(tokenizer):
    code = (
        "from cluster.models import load_tokenizer, tokenizer_fingerprint;"
        f"print(tokenizer_fingerprint(load_tokenizer({EMBEDDED_NAME!r})))"
    )
    output = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert output.split()[-1] == tokenizer_fingerprint(tokenizer)
    assert tokenizer_fingerprint(tokenizer).startswith("sha256:")


def test_fingerprint_does_not_depend_on_use(tiny_tokenizer, tiny_directory):
    before = tokenizer_fingerprint(tiny_tokenizer)
    reloaded = AutoTokenizer.from_pretrained(tiny_directory)
    reloaded("text", truncation=True, max_length=2)
    reloaded.chat_template = None
    assert tokenizer_fingerprint(reloaded) == before


def test_fingerprint_changes_with_the_vocabulary(tiny_tokenizer, tiny_directory, tokenizer):
    changed = AutoTokenizer.from_pretrained(tiny_directory)
    changed.add_tokens(["<new>"])
    prints = {tokenizer_fingerprint(each) for each in (changed, tiny_tokenizer, tokenizer)}
    assert len(prints) == 3


def test_directory_without_tokenizer(tiny_directory):
    for file in tiny_directory.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ModelError, match="cannot load the tokenizer of tiny-llama"):
        load_tokenizer(str(tiny_directory))


def test_revision_is_for_the_hub_only(tiny_directory):
    with pytest.raises(ModelError, match="revision"):
        load_tokenizer(str(tiny_directory), revision="main")


def test_hub_out_of_reach():
    with pytest.raises(ModelError, match=r"hub is not reachable.*local directory"):
        load_tokenizer("no-such-owner/no-such-model")
