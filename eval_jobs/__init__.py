"""Evaluation: benchmarks, comparisons between decoding methods, load generation and reports."""
