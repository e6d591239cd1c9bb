import pytest

from headrace.core.knobs import Knobs
from headrace.tuning.settings import BadValue, changed, live_settings, values

SETTINGS = live_settings(64)


def test_every_setting_is_a_field_of_the_knobs():
    assert values(SETTINGS, Knobs())["max_num_batched_tokens"] == 2048
    for name, setting in SETTINGS.items():
        knobs = changed(SETTINGS, Knobs(), name, setting.high)
        assert getattr(knobs, setting.field) == setting.high
        assert type(getattr(knobs, setting.field)) is (int if setting.whole else float)


@pytest.mark.parametrize(
    ("name", "value", "reported"),
    [
        ("max_num_batched_tokens", 63, "is not between 64 and"),
        ("max_running", 1.5, "whole number"),
        ("max_step_seconds", float("nan"), "needs a number"),
        ("max_step_seconds", True, "needs a number"),
        ("mixed_prefill_ratio", "0.5", "needs a number"),
    ],
)
def test_a_wrong_value_is_named(name, value, reported):
    with pytest.raises(BadValue, match=reported):
        changed(SETTINGS, Knobs(), name, value)
