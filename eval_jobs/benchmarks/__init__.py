"""Benchmarks as data: what they are called, where their files are found, how a row becomes a task."""

from eval_jobs.benchmarks.catalogue import BENCHMARKS, Benchmark
from eval_jobs.benchmarks.finding import DATA_VARIABLE, OWN, BenchmarkError, first_turns, load_benchmark
from eval_jobs.benchmarks.tasks import MT_BENCH_CATEGORIES, Task, pick_per_group

__all__ = [
    "BENCHMARKS",
    "DATA_VARIABLE",
    "MT_BENCH_CATEGORIES",
    "OWN",
    "Benchmark",
    "BenchmarkError",
    "Task",
    "first_turns",
    "load_benchmark",
    "pick_per_group",
]
