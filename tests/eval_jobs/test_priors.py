"""Learning priors: what always comes true ends up likely, what never does unlikely."""

from pathlib import Path

import numpy as np
import pytest

from cluster.decoding import evidence as ev
from eval_jobs.__main__ import main
from eval_jobs.priors import collect, fit, log_loss
from eval_jobs.rows import Trace


def trace(output: list[int], others: int) -> Trace:
    """An answer whose tokens were ranked first, before as many other ones."""
    ranked = [token for t in output for token in (t, *(100 + (t + k) % 50 for k in range(others)))]
    logits = [9.0 - k for _ in output for k in range(others + 1)]
    return Trace("b", "q", 0, "g", [1, 2, 3], output, [], ranked, logits)


def test_evidence_of_a_repeating_text_is_believed_and_wrong_guesses_are_not():
    proofs, outcomes = collect([trace([4, 5, 6, 7] * 20, 12)], [None])
    assert outcomes.any() and not outcomes.all()
    weights = fit(proofs, outcomes)
    chance = 1 / (1 + np.exp(-weights[proofs].sum(axis=1)))
    matched = proofs[:, ev.CONTEXT] > ev.OFFSETS[ev.CONTEXT]
    assert chance[matched & outcomes].mean() > 0.8 and chance[~matched].mean() < 0.1
    assert log_loss(proofs, outcomes, weights) < 0.5 * log_loss(proofs, outcomes, np.zeros(ev.WEIGHTS, np.float32))
    assert all(weights[[ev.OFFSETS[c] for c in range(1, ev.COLUMNS)]] == 0)


def test_a_run_without_traces_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["priors", "--traces", str(tmp_path / "nowhere"), "--out", str(tmp_path / "p.npy")]) == 2
    assert "nowhere" in capsys.readouterr().err
