"""Simulation: drafting code alone on recorded answers, no model."""
