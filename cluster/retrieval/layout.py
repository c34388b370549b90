"""The numbers of the shard format (docs/corpus.md §2) that writer and reader share."""

from __future__ import annotations

from typing import Any

import numpy as np

Int = int | np.integer[Any]  # whole numbers in compiled code, for the type checker

FORMAT = "logitspec-corpus"
FORMAT_VERSION = 1

MAX_SIZE = 7  # of an n-gram: three bits in a slot
MAX_DEPTH = 64
MAX_NODES = 255
MAX_POOL = 1 << 31  # the index in a slot has 31 bits
LOAD_FACTOR = 0.6

SEPARATOR = -1  # between pieces of the pool

# A slot: tag | n | is a trie | index.
TAG_SHIFT = np.uint64(35)
SIZE_SHIFT = np.uint64(32)
KEY_SHIFT = SIZE_SHIFT  # tag and n together: what a probe compares
TRIE_BIT = np.uint64(1 << 31)
INDEX_MASK = np.uint64((1 << 31) - 1)

# Columns of `tries` and `edges`.
TRIE_AT, TRIE_COUNT, TRIE_FIRST_EDGE, TRIE_EDGES = 0, 1, 2, 3
EDGE_AT, EDGE_COUNT, EDGE_LINK = 0, 1, 2
EDGE_LENGTH_MASK = 0xFF
EDGE_PARENT_SHIFT = 8
