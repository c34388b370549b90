"""The step-time model, against steps whose time is known."""

import numpy as np
import pytest

from cluster.engine import step_times
from cluster.engine.prefill import tokens_beside
from cluster.engine.step_times import StepTimes


class Machine:
    """A clock that steps of a known cost move on."""

    def __init__(self) -> None:
        self.now = 0.0
        self.speed = 1.0
        self.reading = 2e-6  # a token of context
        self.attending = 0.0  # of a further token to a token of context

    def seconds(self, width: int, context: int) -> float:
        attended = self.attending * (width - 1) * context
        return self.speed * (0.010 + 0.0005 * max(0, width - 4) + self.reading * context + attended)

    def step(self, width: int, context: int) -> None:
        self.now += self.seconds(width, context)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    monkeypatch.setattr(step_times.time, "perf_counter", lambda: machine.now)
    return machine


def test_measured_times_are_predicted_within_and_beyond_what_was_measured(machine: Machine):
    times = StepTimes(machine.step, 4096)
    costs = times.of_drafting(3, 400, 500)
    expected = [machine.seconds(3 + m, 500) for m in range(401)]
    assert costs == pytest.approx(expected, rel=1e-6)


def test_a_long_context_costs_wide_steps_more(machine: Machine):
    machine.attending = 3e-8
    times = StepTimes(machine.step, 4096)
    costs = times.of_drafting(1, 63, 2000)
    assert costs == pytest.approx([machine.seconds(1 + m, 2000) for m in range(64)], rel=1e-6)
    of_each = times.of_drafting(4, 60, 8000, 4)  # the context of each of four
    assert of_each[60] - of_each[0] == pytest.approx(0.0005 * 60 + 60 * 2000 * machine.attending, rel=1e-6)


def test_observations_move_the_prediction(machine: Machine):
    times = StepTimes(machine.step, 4096)
    times.measure()
    machine.speed = 1.5
    for i in range(300):
        width = (1, 5, 9, 30)[i % 4]
        times.refine(width, 0, machine.seconds(width, 0))
    for width in (1, 5, 9, 30):
        assert times.predict(np.array([width]), 0)[0] == pytest.approx(machine.seconds(width, 0), rel=0.05)


def test_a_machine_that_changes_changes_the_times_of_widths_not_tried(machine: Machine):
    times = StepTimes(machine.step, 4096)
    times.measure()
    machine.speed = 0.8
    for _ in range(100):
        times.refine(1, 0, machine.seconds(1, 0))
    assert times.predict(np.array([1.0, 32.0]), 0) == pytest.approx(
        [machine.seconds(1, 0), machine.seconds(32, 0)], rel=0.1
    )


def test_a_wrong_cost_of_context_does_not_spoil_that_of_width(machine: Machine):
    machine.reading = 4e-5
    times = StepTimes(machine.step, 4096)
    times.measure()
    machine.reading = 2e-6
    for i in range(600):
        width, context = (1, 5)[i % 2], (900, 40)[i // 60 % 2]
        times.refine(width, context, machine.seconds(width, context))
    for context in (40, 900):
        expected = [machine.seconds(width, context) for width in (1, 5, 24)]
        assert times.predict(np.array([1.0, 5.0, 24.0]), context) == pytest.approx(expected, rel=0.25)


def test_what_disturbs_a_measurement_is_not_believed(machine: Machine):
    calls = 0

    def disturbed(width: int, context: int) -> None:
        nonlocal calls
        calls += 1
        machine.step(width, context)
        machine.now += 0.5 if calls < 20 or calls % 3 == 0 else 0.0

    times = StepTimes(disturbed, 4096)
    costs = times.of_drafting(1, 40, 0)
    assert costs == pytest.approx([machine.seconds(1 + m, 0) for m in range(41)], rel=0.1)


def test_wider_steps_never_seem_cheaper_and_one_hiccup_does_little(machine: Machine):
    times = StepTimes(machine.step, 4096)
    times.measure()
    times.refine(6, 0, 100.0)
    costs = times.of_drafting(1, 60, 0)
    assert np.all(np.diff(costs) >= 0)
    assert costs[5] <= 1.14 * machine.seconds(6, 0)


def test_prompts_beside_decoding_sequences_keep_steps_short(machine: Machine):
    times = StepTimes(machine.step, 1000)
    untimed = tokens_beside(times, 1, 10)
    times.measure()
    chunks = [tokens_beside(times, decoding, 10 * decoding) for decoding in (1, 8, 32)]
    for decoding, chunk in zip((1, 8, 32), chunks, strict=True):
        alone, beside = (machine.seconds(decoding + n, 10 * decoding) for n in (0, chunk))
        assert 1.4 * alone < beside < 2.2 * alone
    assert chunks[0] < chunks[-1] and untimed > 0


def test_many_prompts_beside_few_sequences_get_on_faster(machine: Machine):
    times = StepTimes(machine.step, 1000)
    times.measure()
    one, some, many = (tokens_beside(times, 4, 40, prompts) for prompts in (1, 9, 99))
    assert one < some < many
    assert machine.seconds(4 + many, 40) < 9 * machine.seconds(4, 40)


def test_prompts_that_make_steps_long_anyway_still_get_on(machine: Machine):
    machine.seconds = lambda width, context: 0.01 * width  # type: ignore[method-assign]
    times = StepTimes(machine.step, 1000)
    times.measure()
    assert tokens_beside(times, 1, 0) > 0
