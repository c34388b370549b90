"""The tokenizer a GGUF file describes.

transformers builds it from the file's vocabulary and merges, but for byte-level BPE it knows only some of the
pre-tokenizers a file can name, and silently takes GPT-2's for the others. Here the missing ones are put in
where the recipe is known, and a file with an unknown one is refused: with the wrong split the model would be
fed token sequences it was never trained on.
"""

from typing import Any

from tokenizers import pre_tokenizers
from tokenizers.pre_tokenizers import ByteLevel, PreTokenizer
from transformers import PreTrainedTokenizerFast

from cluster.models.errors import ModelError
from cluster.models.failures import explained
from cluster.models.gguf_header import GgufHeader

# llama.cpp's names of pre-tokenizers, by what they do before byte-level BPE.
_LIKE_GPT2 = frozenset({"gpt-2", "gpt2", "phi-2", "olmo", "mpt", "jais", "exaone4"})
_SINGLE_DIGITS = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"})
_LLAMA3 = frozenset({"llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"})

# With these, a word that is in the vocabulary is taken whole, and a text starts with BOS unless the file
# says otherwise.
_WHOLE_WORDS = _LLAMA3 | {"tekken"}


def build_tokenizer(header: GgufHeader) -> PreTrainedTokenizerFast:
    """The tokenizer for a GGUF file, chat template included where it has one.

    Raises ModelError for a vocabulary type or pre-tokenizer that cannot be rebuilt exactly.
    """
    kind, pre = header.metadata.get("tokenizer.ggml.model"), header.metadata.get("tokenizer.ggml.pre")
    options: dict[str, Any] = {}
    if pre in _WHOLE_WORDS and "tokenizer.ggml.add_bos_token" not in header.metadata:
        options["add_bos_token"] = True
    with explained(f"the tokenizer of {header.path}"):
        tokenizer = PreTrainedTokenizerFast.from_pretrained(
            str(header.path.parent), gguf_file=header.path.name, local_files_only=True, **options
        )
    if kind == "gpt2":
        _set_split(tokenizer, pre, header)
    return tokenizer


def _set_split(tokenizer: PreTrainedTokenizerFast, pre: str | None, header: GgufHeader) -> None:
    backend = tokenizer.backend_tokenizer
    if pre in _SINGLE_DIGITS:
        backend.pre_tokenizer = _single_digits()
    elif isinstance(backend.pre_tokenizer, ByteLevel) and pre not in _LIKE_GPT2:
        raise ModelError(
            f"{header.path} names the pre-tokenizer {pre!r}, which is not known here; use the model's "
            "directory in Hugging Face format (with tokenizer.json)"
        )
    if pre in _WHOLE_WORDS:
        backend.model.ignore_merges = True


def _single_digits() -> PreTokenizer:
    """Each digit alone, then GPT-2's split."""
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
