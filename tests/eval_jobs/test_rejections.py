"""What is known off an answer is found again from any tree that goes there."""

from __future__ import annotations

import numpy as np

from cluster.decoding.drafting import Draft, Verified
from cluster.decoding.ranking import Ranked
from cluster.decoding.tree import CONTEXT, DraftTree, TreeBuilder
from eval_jobs.rejections import Rejections

ANSWER = [10, 11, 12, 13, 14]


def tree(root: int, *paths: list[int]) -> DraftTree:
    """The trie of these paths below a root."""
    builder = TreeBuilder(16)
    builder.reset(root)
    for path in paths:
        builder.add_path(np.array(path, np.int32), CONTEXT)
    return builder.build()


def verified(drafted: DraftTree, nodes: list[int], emitted: list[int]) -> Verified:
    """A step; the best ids behind a node are 100 and 1000 times its token, a logit of 1 apart."""
    ids = np.outer(drafted.tokens, [100, 1000]).astype(np.int32)
    ranked = Ranked(ids, np.tile(np.array([0.0, 1.0], np.float32), (len(ids), 1)))
    return Verified(Draft(drafted, False), -1, np.array(nodes), np.array(emitted, np.int32), ranked)


def steps() -> list[Verified]:
    """The prefill, then a tree below the answer's first token of which one token is accepted."""
    drafted = tree(10, [11, 7, 8], [6, 12])
    return [verified(tree(1), [0], [10]), verified(drafted, [0, 1], [11, 12])]


def test_rejected_nodes_are_found_from_another_root():
    found = Rejections.on_the_way(ANSWER, steps())
    assert len(found.tokens) == 4
    later = tree(11, [7, 8, 9], [6])
    ranked = found.ranked(later, np.array([0]), position=2, count=2)
    assert ranked.ids.tolist() == [[-1, -1], [700, 7000], [800, 8000], [-1, -1], [-1, -1]]
    assert ranked.gaps[1].tolist() == [0.0, 1.0]


def test_the_same_tokens_elsewhere_are_other_nodes():
    found = Rejections.on_the_way(ANSWER, steps())
    assert (found.ranked(tree(12, [7, 8], [6]), np.array([0]), position=3, count=2).ids < 0).all()


def test_more_or_fewer_ids_can_be_asked_for():
    found = Rejections.on_the_way(ANSWER, steps())
    drafted = tree(10, [6])
    assert found.ranked(drafted, np.array([0]), 1, 1).ids[1].tolist() == [600]
    assert found.ranked(drafted, np.array([0]), 1, 3).ids[1].tolist() == [600, 6000, -1]


def test_what_belongs_to_another_answer_is_not_kept():
    assert not Rejections.on_the_way([10, 99, 12], steps()).tokens
    assert not Rejections().ranked(tree(10, [6]), np.array([0]), 1, 2).ids.max() >= 0


def test_flat_lists_are_all_there_is_to_it():
    found = Rejections.on_the_way(ANSWER, steps())
    again = Rejections(found.parents, found.tokens, found.ids, found.gaps)
    drafted = tree(10, [11, 7, 8], [6, 12])
    one, other = (r.ranked(drafted, np.array([0, 1]), 1, 2) for r in (found, again))
    assert one.ids.tolist() == other.ids.tolist()
    assert (one.ids[2:, 0] >= 0).all() and (one.ids[:2] < 0).all()
