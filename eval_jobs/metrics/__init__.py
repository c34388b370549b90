"""What the rows of a run say: pure functions of rows, traces and divergences."""
