"""The plan is printed once, and a bar appears in long steps only and vanishes with them."""

import gc
import io
from types import SimpleNamespace

import pytest
from tqdm.auto import tqdm

from sppo_hf import SPPOPlugin
from sppo_hf.integrations import progress
from sppo_hf.integrations.progress import SHOW_AFTER_SECONDS, ProgressReporter


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class _Clock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def monotonic(self) -> float:
        return self.seconds


@pytest.fixture
def clock(monkeypatch) -> _Clock:
    clock = _Clock()
    monkeypatch.setattr(progress, "time", clock)
    monkeypatch.setattr(progress, "REDRAW_AFTER_SECONDS", 0)
    return clock


@pytest.fixture
def terminal(monkeypatch) -> _Terminal:
    terminal = _Terminal()
    # Not sys itself: pytest puts its own stderr back between a fixture and its test.
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=terminal))
    return terminal


def _run_step(reporter: ProgressReporter, clock: _Clock, unit_seconds: float) -> None:
    for chunk in range(4):
        reporter.on_unit("forward", chunk, 4)
        clock.seconds += unit_seconds
    for chunk in reversed(range(4)):
        reporter.on_unit("backward", chunk, 4)
        clock.seconds += unit_seconds
    reporter.on_record(SimpleNamespace(training=True))


def test_a_long_step_shows_where_it_is_and_cleans_up(clock, terminal):
    reporter = ProgressReporter()
    _run_step(reporter, clock, unit_seconds=SHOW_AFTER_SECONDS)
    shown = terminal.getvalue()
    assert "chunk 2/4 forward" in shown
    assert "chunk 1/4 backward" in shown
    assert "chunk 1/4 forward" not in shown  # the step was young then
    assert shown.split("\r")[-1].strip() == ""  # erased, and no new line left behind
    assert "\n" not in shown


def test_a_bar_shows_host_memory_that_takes_long(clock, terminal):
    for pieces, shown in ((2, False), (4, True)):
        reporter = ProgressReporter()
        for ready in range(pieces + 1):
            reporter.on_host_memory(ready * 2**30, pieces * 2**30)
            clock.seconds += 0.8 * SHOW_AFTER_SECONDS
        assert ("page-locking host memory" in terminal.getvalue()) is shown
    assert "2.15G/4.29G" in terminal.getvalue()
    assert terminal.getvalue().split("\r")[-1].strip() == ""  # over
    reporter = ProgressReporter(show_plan=False)
    reporter.on_host_memory(0, 2**30)
    clock.seconds += SHOW_AFTER_SECONDS
    reporter.on_host_memory(2**20, 2**30)  # and the system gives no more
    reporter.on_plan(SimpleNamespace(training=True), "a model")
    assert terminal.getvalue().split("\r")[-1].strip() == ""


def test_attention_set_up_is_printed_in_one_line(clock, terminal):
    ProgressReporter().on_attention_ready("cudnn", 14, 9.87)
    said = terminal.getvalue()
    assert said.count("\n") == 1
    assert "cudnn built what it needs for 14 shapes (9.9 s, once for each)" in said
    ProgressReporter(show_progress=False).on_attention_ready("cudnn", 14, 9.87)
    assert terminal.getvalue() == said


def test_a_short_step_shows_nothing(clock, terminal):
    reporter = ProgressReporter()
    for _ in range(3):
        _run_step(reporter, clock, unit_seconds=SHOW_AFTER_SECONDS / 10)
    assert terminal.getvalue() == ""


def test_a_step_that_failed_does_not_make_the_next_one_look_long(clock, terminal):
    reporter = ProgressReporter()
    reporter.on_unit("forward", 0, 4)
    clock.seconds += 10 * SHOW_AFTER_SECONDS
    _run_step(reporter, clock, unit_seconds=0.0)
    assert terminal.getvalue() == ""


@pytest.mark.parametrize("reason", ["setting", "disable_tqdm", "no terminal", "another rank"])
def test_no_bar_where_it_is_unwanted(reason, clock, terminal, monkeypatch):
    reporter = ProgressReporter(show_progress=reason != "setting")
    reporter.bars_wanted = reason != "disable_tqdm"
    if reason == "no terminal":
        terminal.isatty = lambda: False
    if reason == "another rank":
        monkeypatch.setenv("RANK", "1")
    _run_step(reporter, clock, unit_seconds=SHOW_AFTER_SECONDS)
    assert terminal.getvalue() == ""


class _Plan(SimpleNamespace):
    def __init__(self, name: str, training: bool) -> None:
        super().__init__(name=name, training=training)

    def __str__(self) -> str:
        return f"plan {self.name}"


@pytest.fixture
def _plain_table(monkeypatch):
    monkeypatch.setattr(progress, "plan_table", lambda plan, name: f"table of {name}: {plan}")


@pytest.mark.usefixtures("_plain_table")
def test_the_first_plan_of_training_and_of_evaluation_is_printed(terminal):
    reporter = ProgressReporter()
    for name, training in [("a", False), ("b", True), ("c", False), ("d", True)]:
        reporter.on_plan(_Plan(name, training), "Llama")
    shown = terminal.getvalue()
    assert [name for name in "abcd" if f"plan {name}" in shown] == ["a", "b"]


@pytest.mark.usefixtures("_plain_table")
def test_the_plan_begins_a_line_of_its_own_below_no_bar(terminal):
    with tqdm(total=3, file=terminal):  # the Trainer's
        ProgressReporter().on_plan(_Plan("a", training=True), "Llama")
        before, _, _ = terminal.getvalue().partition("table of Llama")
    assert "0/3" in before
    assert before.split("\r")[-1].strip() == ""


@pytest.mark.usefixtures("_plain_table")
def test_the_plan_is_printed_where_the_plugin_is_kept_nowhere(terminal):
    """An engine has the plugin's hub alone, and in SPPOPlugin().convert(model) nobody more."""
    hub = SPPOPlugin().observer
    gc.collect()
    hub.on_plan(_Plan("a", training=True), "Llama")
    assert "plan a" in terminal.getvalue()


@pytest.mark.usefixtures("_plain_table")
@pytest.mark.parametrize("reason", ["setting", "another rank"])
def test_no_table_where_it_is_unwanted(reason, terminal, monkeypatch):
    reporter = ProgressReporter(show_plan=reason != "setting")
    if reason == "another rank":
        monkeypatch.setenv("RANK", "1")
    reporter.on_plan(_Plan("a", training=True), "Llama")
    assert terminal.getvalue() == ""
