"""Grammars that answers must follow, with llguidance: JSON schemas, JSON objects, function calls."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import llguidance.hf
import numpy as np
import torch
from llguidance import LLMatcher
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

# Between JSON's tokens. Unbounded white space is a trap that small models fall into.
_WHITE_SPACE = r"[ \n\t]{0,12}"
# Of a schema. OpenAI takes as much; constants of some megabytes would hold up steps for seconds.
_LONGEST_SCHEMA = 120_000


class GrammarError(ValueError):
    """A grammar that cannot be made or followed; the message says why."""


def json_schema_grammar(schema: Mapping[str, Any]) -> str:
    """The grammar of all JSON texts that a schema allows.

    Raises:
        GrammarError: it is no schema, is too long, or uses what is not supported.
    """
    if len(json.dumps(schema, ensure_ascii=False)) > _LONGEST_SCHEMA:
        raise GrammarError(f"it is longer than {_LONGEST_SCHEMA} characters")
    try:
        grammar: str = LLMatcher.grammar_from_json_schema(dict(schema), overrides={"whitespace_pattern": _WHITE_SPACE})
    except ValueError as error:
        raise GrammarError(str(error)) from error
    return _validated(grammar)


def tagged_call_grammar(schema: Mapping[str, Any], opening: str, closing: str, special: Collection[str]) -> str:
    """The grammar of one JSON text between two tags; tags that are tokens of the tokenizer are in ``special``.

    Raises:
        GrammarError: as ``json_schema_grammar``.
    """
    first, last = (tag if tag in special else json.dumps(tag) for tag in (opening, closing))
    options = {"x-guidance": {"whitespace_pattern": _WHITE_SPACE}}
    call = json.dumps({**schema, **options})
    return LLMatcher.grammar_from_lark(f'start: {first} "\\n" call "\\n" {last}\ncall: %json {call}')


def _validated(grammar: str) -> str:
    is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar)
    if is_error:
        raise GrammarError(messages[0].splitlines()[0] if messages[0] else "it is not valid")
    return grammar


class GrammarCompiler:
    """Makes constraints from grammars, for one model's tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocabulary: int, stop_ids: Collection[int]) -> None:
        """``vocabulary`` is the width of the model's logits, ``stop_ids`` end an answer where the grammar lets it.

        Raises:
            GrammarError: the tokenizer is of a kind that does not work with grammars.
        """
        self._stop_ids = sorted(stop_ids)
        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            raise GrammarError("the model's tokenizer is of a kind that grammars do not work with")
        self._tokenizer = llguidance.hf.from_tokenizer(tokenizer, n_vocab=vocabulary, eos_token=self._stop_ids)

    def constraint(self, grammar: str) -> GrammarConstraint:
        """A constraint for one answer.

        Raises:
            GrammarError: the grammar is too complex, not valid, or allows no text at all.
        """
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
        if not matcher.is_error():
            matcher.compute_bitmask()  # the first one takes longest, and tells if there is a way to begin
        if matcher.is_error():
            error = matcher.get_error().splitlines()[0]
            raise GrammarError("it allows no text" if error.startswith("NoExtension") else error)
        return GrammarConstraint(matcher, self._stop_ids)


class GrammarConstraint:
    """A grammar's state along one answer; a ``cluster.decoding.constraint.Constraint``."""

    def __init__(self, matcher: LLMatcher, stop_ids: Sequence[int]) -> None:
        self._matcher = matcher
        self._stop_ids = list(stop_ids)

    def mask(self, row: Tensor) -> None:
        """See ``Constraint``. A finished text may only end."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        allowed = np.unpackbits(bits, count=len(row), bitorder="little").astype(np.bool_)
        row.masked_fill_(torch.from_numpy(~allowed).to(row.device), -torch.inf)
        if bool(torch.isneginf(row).all()):
            row[self._stop_ids] = 0.0

    def observe(self, token: int) -> None:
        """See ``Constraint``."""
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token)

    def valid_length(self, path: Sequence[int]) -> int:
        """See ``Constraint``."""
        return int(self._matcher.validate_tokens(list(path)))

    def forced(self) -> list[int]:
        """See ``Constraint``."""
        return list(self._matcher.compute_ff_tokens())
