"""Reports of runs: tables, plots, one page, and answers in Spec-Bench's format."""
