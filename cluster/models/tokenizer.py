"""Loading a tokenizer, and telling tokenizers apart."""

import hashlib
import json
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from cluster.models.checkpoints import tokenizer_checkpoint
from cluster.models.errors import ModelError
from cluster.models.failures import explained
from cluster.models.resolve import ModelSource, SourceKind, resolve


def load_tokenizer(
    model: str, *, trust_remote_code: bool = False, revision: str | None = None
) -> PreTrainedTokenizerBase:
    """The tokenizer of a model named as in `ModelConfig.model`, without its weights. Raises ModelError."""
    source = resolve(model)
    return tokenizer_of(source, tokenizer_checkpoint(source), trust_remote_code, revision)


def tokenizer_of(
    source: ModelSource, checkpoint: str, trust_remote_code: bool, revision: str | None
) -> PreTrainedTokenizerBase:
    """The tokenizer at a checkpoint of `source`. Raises ModelError."""
    options = hub_options(source, trust_remote_code, revision)
    with explained(f"the tokenizer of {source.name}"):
        return AutoTokenizer.from_pretrained(checkpoint, **options)


def hub_options(source: ModelSource, trust_remote_code: bool, revision: str | None) -> dict[str, Any]:
    """transformers' options on where to look. Raises ModelError for a revision of what is not on the hub."""
    if source.kind is SourceKind.HUB:
        return {"trust_remote_code": trust_remote_code, "revision": revision or "main"}
    if revision is not None:
        raise ModelError(f"revision is for hub models only, and {source.name} is not one; leave it out")
    return {"trust_remote_code": trust_remote_code, "local_files_only": True}


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Text `sha256:` and a hash of what gives token ids their meaning: vocabulary, merges and added tokens.

    The same for the same tokenizer in every process and however it was loaded. Corpora are tied to it.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        parts: list[Any] = [sorted(tokenizer.get_vocab().items())]
    else:
        state = json.loads(backend.to_str())
        added = sorted((token["id"], token["content"], token["special"]) for token in state["added_tokens"])
        parts = [_by_id(state["model"]["vocab"]), state["model"].get("merges"), added]
    digest = hashlib.sha256(json.dumps(parts, separators=(",", ":")).encode())
    return f"sha256:{digest.hexdigest()}"


def _by_id(vocab: dict[str, int] | list[Any]) -> list[Any]:
    """A vocabulary in the order of ids; unigram vocabularies are lists in that order already."""
    return vocab if isinstance(vocab, list) else sorted(vocab, key=vocab.__getitem__)
