"""Methods by name."""

from __future__ import annotations

from cluster.decoding.adaptive import Adaptive
from cluster.decoding.drafting import Drafter
from cluster.decoding.logitspec import LogitSpec
from cluster.decoding.lookup_methods import PromptLookup, Rest, Vanilla
from cluster.decoding.params import Method
from cluster.retrieval.lookup import CorpusLookup, Within

CPU_CAPACITY, GPU_CAPACITY = 8, 64  # most nodes of trees filled by rule, where the request does not say


class MissingCorpus(ValueError):
    """A method was asked for that drafts from a corpus, and there is none."""


def make_drafter(method: Method, vocabulary: int, corpus: CorpusLookup | None = None) -> Drafter:
    """The drafter of a method name, for a model with so many token ids.

    Raises:
        MissingCorpus: the method needs a corpus.
    """
    if method == "vanilla":
        return Vanilla()
    if method == "pld":
        return PromptLookup()
    if method == "logitspec":
        return LogitSpec(Within(corpus, vocabulary) if corpus is not None else None)
    if method == "adaptive":
        return Adaptive(vocabulary, corpus)
    if corpus is None:
        raise MissingCorpus(
            f"method {method!r} drafts from a reference corpus; give one (--corpus DIR, corpus=DIR of a server)"
        )
    return Rest(Within(corpus, vocabulary))
