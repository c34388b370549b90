"""Sweeps: benchmarks × methods × repeats, answered by actors across a Ray cluster, resumable at the generation."""
