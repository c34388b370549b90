"""Requests and answers as bytes: what is packed is what comes out."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from cluster.retrieval.lookup import LookupResult
from cluster.retrieval.wire import pack_request, pack_result, unpack_request, unpack_result

INT32 = st.integers(0, 2**31 - 1)


@given(st.integers(1, 5), st.integers(1, 4), st.data())
def test_requests(count: int, width: int, data: st.DataObject):
    queries = data.draw(arrays(np.int32, (count, width), elements=INT32))
    lengths, limits = data.draw(arrays(np.int32, (2, count), elements=INT32))
    read = unpack_request(pack_request(queries, lengths, limits))
    for sent, come in zip((queries, lengths, limits), read, strict=True):
        assert np.array_equal(sent, come)
        # Compiled code is compiled anew, for seconds, for arrays of another kind, so all must be of one kind.
        assert (come.flags.writeable, come.flags.c_contiguous, come.dtype) == (True, True, np.int32)


@given(arrays(np.int32, st.tuples(st.just(3), st.integers(0, 9)), elements=INT32))
def test_results(nodes: np.ndarray):
    size = nodes.shape[1]
    sent = LookupResult(
        np.array([2, 0], np.int8), np.array([7, 0], np.int32), np.array([0, size, size], np.int32), *nodes
    )
    come = unpack_result(pack_result(sent))
    for name in ("matched", "totals", "offsets", "tokens", "parents", "counts"):
        assert np.array_equal(getattr(sent, name), getattr(come, name)), name
