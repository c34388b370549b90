"""Lookups say exactly what a scan of the documents says: matches, counts, continuations, back-off, truncation."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.retrieval import BuildParameters, Corpus, LookupResult, as_queries, hashing
from corpus_builder.finishing import Cut
from tests.corpora import Documents, paths_of, scan, write_corpus

TOKENS = st.sampled_from([0, 1, 2, 3, 70_000])
DOCUMENTS = st.lists(st.lists(TOKENS, max_size=40), max_size=6)
SIZES = st.sampled_from([(1, 2, 3, 4), (2, 3), (1,), (2, 4), (3, 5, 7)])
ALL_NODES = 255


def corpus_of(documents: Documents, parameters: BuildParameters, shards: int = 1, cut: Cut | None = None) -> Corpus:
    """A corpus whose files are gone from the directory but still mapped."""
    with tempfile.TemporaryDirectory() as folder:
        return write_corpus(Path(folder), documents, parameters, shards, cut)


def check_all(corpus: Corpus, documents: Documents, more_queries: Documents) -> None:
    """Compare every n-gram of the documents, each with other tokens before it, and more queries, with the scan."""
    sizes, depth = corpus.sizes, corpus.manifest.parameters.depth
    truth = scan(documents, sizes, depth)
    assert corpus.manifest.ngrams == len(truth)
    contexts = [list(query) for query in (*truth, *more_queries)]
    contexts += [[3, 1, *query] for query in contexts]
    queries, lengths = as_queries(contexts, 9)
    result = corpus.lookup(queries, lengths, ALL_NODES)
    for q, context in enumerate(contexts):
        suffixes = (tuple(context[len(context) - n :]) for n in sorted(sizes, reverse=True) if n <= len(context))
        known = next((suffix for suffix in suffixes if suffix in truth), ())
        assert result.matched[q] == len(known)
        total, paths = truth[known] if known else (0, {})
        assert result.totals[q] == total
        found = paths_of(result, q)
        if len(paths) <= ALL_NODES:
            assert found == paths
        else:
            assert found.items() <= paths.items()


@settings(max_examples=80)
@given(DOCUMENTS, SIZES, st.sampled_from([1, 2, 5, 10]), st.sampled_from([1, 3]), DOCUMENTS)
def test_every_answer_is_what_a_scan_finds(
    documents: Documents, sizes: tuple[int, ...], depth: int, shards: int, others: Documents
):
    parameters = BuildParameters(sizes=sizes, depth=depth, max_nodes=ALL_NODES)
    check_all(corpus_of(documents, parameters, shards), documents, others)


@settings(max_examples=30)
@given(DOCUMENTS, DOCUMENTS, st.sampled_from([0, 1 << 35, 7 << 35, (3 << 40) + (1 << 31)]))
def test_collisions_cost_no_correctness(documents: Documents, others: Documents, mask: int):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hashing, "FINGERPRINT_MASK", mask)
        parameters = BuildParameters(sizes=(1, 2, 3), depth=4, max_nodes=ALL_NODES)
        check_all(corpus_of(documents, parameters), documents, others)


@settings(max_examples=30)
@given(DOCUMENTS, st.integers(1, 12), st.integers(1, 12))
def test_fewer_nodes_are_the_best_nodes(documents: Documents, kept: int, asked: int):
    """Both the builder's and the query's bound leave the first nodes of the whole trie, in the same order."""
    whole = corpus_of(documents, BuildParameters(max_nodes=ALL_NODES))
    cut = corpus_of(documents, BuildParameters(max_nodes=kept))
    ngrams = [list(ngram) for ngram in scan(documents, whole.sizes, 1)]
    queries, lengths = as_queries(ngrams, 4)
    everything = whole.lookup(queries, lengths, ALL_NODES)
    some = cut.lookup(queries, lengths, asked)
    for q in range(len(ngrams)):
        assert list(paths_of(some, q).items()) == list(paths_of(everything, q).items())[: min(kept, asked)]


@settings(max_examples=40)
@given(DOCUMENTS, st.integers(2, 4))
def test_pruning_by_count(documents: Documents, min_count: int):
    """What is seen less often is gone, n-grams and continuations alike, and nothing else."""
    parameters = BuildParameters(sizes=(1, 2, 3), depth=5, max_nodes=ALL_NODES, min_count=min_count)
    corpus = corpus_of(documents, parameters)
    expected = {}
    for ngram, (total, paths) in scan(documents, (1, 2, 3), 5).items():
        common = {path: count for path, count in paths.items() if count >= min_count}
        if total >= min_count and common:
            expected[ngram] = (total, common)
    assert corpus.manifest.ngrams == len(expected)
    queries, lengths = as_queries([list(ngram) for ngram in expected], 3)
    result = corpus.lookup(queries, lengths, ALL_NODES)
    for q, (total, paths) in enumerate(expected.values()):
        assert (result.totals[q], paths_of(result, q)) == (total, paths)


def test_cut_at_a_fingerprint_drops_part_of_the_rarest():
    random = np.random.default_rng(0)
    documents = [random.integers(0, 30, 200).tolist() for _ in range(20)]
    whole, half = (
        corpus_of(documents, BuildParameters(), cut=cut) for cut in (Cut(1), Cut(1, last_fingerprint=1 << 63))
    )
    assert corpus_of(documents, BuildParameters(), cut=Cut(2)).manifest.entries < half.manifest.entries
    assert half.manifest.entries < whole.manifest.entries
    check_subset(half, whole, documents)


def check_subset(part: Corpus, whole: Corpus, documents: Documents) -> None:
    """What a pruned corpus finds at full length is what the whole one finds."""
    queries, lengths = as_queries([list(ngram) for ngram in scan(documents, (4,), 1)], 4)
    a, b = part.lookup(queries, lengths, ALL_NODES), whole.lookup(queries, lengths, ALL_NODES)
    same = np.flatnonzero(a.matched == 4)
    assert 0 < len(same) < len(a)
    for q in same.tolist():
        assert paths_of(a, q) == paths_of(b, q)


def test_limits_by_query_and_short_queries():
    corpus = corpus_of([[1, 2, 3, 4, 5, 6]] * 2, BuildParameters(sizes=(2, 3)))
    queries, lengths = as_queries([[1, 2], [1, 2], [2], [], [1, 2]], 3)
    result = corpus.lookup(queries, lengths, np.array([1, 3, 9, 9, 0], np.int32))
    assert result.matched.tolist() == [2, 2, 0, 0, 0]
    assert np.diff(result.offsets).tolist() == [1, 3, 0, 0, 0]
    assert result.tokens.tolist() == [3, 3, 4, 5]


def test_queries_narrower_and_wider_than_the_largest_size():
    corpus = corpus_of([[1, 2, 3, 4, 5, 6]], BuildParameters())
    for width in (1, 2, 7):
        queries, _ = as_queries([[0, 0, 2, 3, 4]], width)
        result = corpus.lookup(queries, np.array([9], np.int32), 1)
        assert (result.matched[0], result.tokens.tolist()) == (min(width, 3), [5])


def test_no_queries():
    corpus = corpus_of([[1, 2, 3]], BuildParameters())
    result = corpus.submit(np.zeros((0, 4), np.int32), np.zeros(0, np.int32), 8).collect()
    assert isinstance(result, LookupResult)
    assert len(result) == 0


def test_documents_do_not_run_into_each_other():
    corpus = corpus_of([[1, 2], [3, 4]], BuildParameters(), shards=3)
    queries, lengths = as_queries([[2], [1, 2], [1]], 4)
    assert corpus.lookup(queries, lengths, 9).matched.tolist() == [0, 0, 1]
