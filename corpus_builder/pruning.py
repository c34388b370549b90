"""Choosing what to prune so that a corpus keeps to a size budget (docs/corpus.md §5)."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.retrieval import CorpusError
from corpus_builder.finishing import ALL_FINGERPRINTS, Cut
from corpus_builder.job import Job
from corpus_builder.ray_steps import run_step
from corpus_builder.shard_steps import MeasureStep

_SHARD_OVERHEAD = 4 << 10  # Arrow's headers, and the few slots after the home slots
_STEPS = 16


def choose_cut(job: Job, workers: int) -> Cut:
    """The cut that keeps most within `max_bytes`. Raises CorpusError when nothing fits."""
    least = job.parameters.min_count
    counts = sorted({least + (1 << power) - 1 for power in range(30)})
    fits = _fitting(job, workers, [Cut(count) for count in counts])
    if fits[0]:
        return Cut(least)
    if not any(fits):
        raise CorpusError(
            f"--max-bytes {job.parameters.max_bytes} is too small for {job.shards} shards; "
            "allow more bytes, or use fewer shards"
        )
    first = fits.index(True)
    too_low, count = counts[first - 1], counts[first]
    while count - too_low > 1:
        step = max(1, (count - too_low) // _STEPS)
        between = list(range(too_low + step, count, step))
        fits = [*_fitting(job, workers, [Cut(value) for value in between]), True]
        first = fits.index(True)
        count, too_low = [*between, count][first], [too_low, *between][first]
    parts = [Cut(too_low, ALL_FINGERPRINTS // _STEPS * part) for part in range(_STEPS - 1, 0, -1)]
    fits = _fitting(job, workers, parts)
    return parts[fits.index(True)] if any(fits) else Cut(count)


def _fitting(job: Job, workers: int, cuts: Sequence[Cut]) -> list[bool]:
    """Whether all shards together keep to the budget under each cut."""
    sizes = run_step(MeasureStep(job, cuts), [None] * job.shards, workers, "measure")
    totals = [sum(shard[number] + _SHARD_OVERHEAD for shard in sizes) for number in range(len(cuts))]
    return [total <= (job.parameters.max_bytes or 0) for total in totals]
