"""Actions and their text: exact inverses, and errors that show the text and the form."""

import re
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sppo_hf.errors import ScheduleError
from sppo_hf.schedule.actions import KIND_NAMES, Action

numbers = st.integers(0, 10**7)
maybe = st.none() | numbers
actions = st.builds(Action, st.sampled_from(list(KIND_NAMES)), numbers, numbers, maybe, maybe)


@pytest.mark.parametrize(
    ("action", "text"),
    [
        (Action("F", 2, 5), "2F5"),
        (Action("B", 0, 5, 12), "0B5.12"),
        (Action("K", 0, 5, 12, 3), "0K5.12#3"),
        (Action("O", 10, 0, None, 0), "10O0#0"),
    ],
)
def test_text_form(action: Action, text: str) -> None:
    assert str(action) == text
    assert f"{action}" == text
    assert Action.parse(text) == action


@given(actions)
def test_parse_undoes_print(action: Action) -> None:
    assert Action.parse(str(action)) == action


@given(
    st.from_regex(r"\A[0-9]{1,3}[A-Z][0-9]{0,3}(\.[0-9]{0,3})?(#[0-9]{0,2})?\n?\Z")
    | actions.map(str)
    | st.text(max_size=8)
)
def test_print_undoes_parse(text: str) -> None:
    with suppress(ScheduleError):
        assert str(Action.parse(text)) == text


@pytest.mark.parametrize(
    "text", ["", "F5", "2F", "2X5", "2f5", " 2F5", "2F5\n", "02F5", "2F05", "-1F5", "2F5.", "٢F5"]
)
def test_bad_text_is_shown_with_the_form(text: str) -> None:
    with pytest.raises(ScheduleError, match=re.escape(repr(text))) as caught:
        Action.parse(text)
    assert "'0F5.12'" in str(caught.value)
    assert "F forward" in str(caught.value)
