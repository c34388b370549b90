"""The reference corpus: shard files, lookup, and the Ray actors that hold shards (docs/corpus.md)."""

from cluster.retrieval.corpus import Corpus, check_tokenizer, verify
from cluster.retrieval.errors import CorpusError
from cluster.retrieval.lookup import CorpusLookup, LookupResult, PendingLookup, as_queries
from cluster.retrieval.manifest import BuildParameters, Manifest

__all__ = [
    "BuildParameters",
    "Corpus",
    "CorpusError",
    "CorpusLookup",
    "LookupResult",
    "Manifest",
    "PendingLookup",
    "as_queries",
    "check_tokenizer",
    "verify",
]
