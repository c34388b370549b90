"""Is an answer right: numbers and expressions by matching, code by running its tests."""

from eval_jobs.scoring.code import program_with_tests, run_program
from eval_jobs.scoring.matching import is_right_expression, is_right_number

__all__ = ["is_right_expression", "is_right_number", "program_with_tests", "run_program"]
