import pytest

from headrace.tuning.settings import live_settings, request_settings
from headrace.tuning.spec import BadExperiment, read_plan, read_spec

SETTINGS = {**live_settings(64), **request_settings(("ngram",), 4, semantic=True)}
PRESENT = {"mixed_prefill_ratio": 0.7, "max_running": 0}
GOOD = {"setting": "mixed_prefill_ratio", "treatment": 0.4, "metric": "itl_p99_seconds"}


def test_an_experiment_takes_the_present_value_as_control():
    spec = read_spec(GOOD | {"guards": {"ttft_p99_seconds": 0.2}, "adopt": True}, SETTINGS, PRESENT)
    assert (spec.control, spec.treatment, spec.adopt) == (0.7, 0.4, True)
    assert spec.guards == {"ttft_p99_seconds": 0.2}
    assert spec.pair_seconds == 70.0


@pytest.mark.parametrize(
    ("change", "reported"),
    [
        ({"setting": None}, "setting: expected one of mixed_prefill_ratio, max_running"),
        ({"setting": "mixed_prefil_ratio"}, "did you mean mixed_prefill_ratio"),
        ({"treatment": 0.7}, "treatment: mixed_prefill_ratio is 0.7 already"),
        ({"metric": "itl_p99"}, "metric: expected one of .* did you mean itl_p99_seconds"),
        ({"window_seconds": 0}, "window_seconds: 0 is not between 0.1 and 86400"),
        ({"window_seconds": "30"}, "window_seconds: expected a number"),
        ({"max_seconds": 10.0}, "max_seconds: one pair of windows takes 70 s"),
        ({"alpha": 0.9}, "alpha: 0.9 is not between 1e-06 and 0.5"),
        ({"guards": ["itl_p99_seconds"]}, "guards: expected an object"),
        ({"guards": {"itl": 0.1}}, "guards.itl: no such metric"),
        ({"guards": {"itl_p99_seconds": True}}, "guards.itl_p99_seconds: expected a number"),
        ({"seed": 1.5}, "seed: expected an integer"),
        ({"adopt": 1}, "adopt: expected true or false"),
        ({"name": "x" * 201}, "name: expected text of at most 200 characters"),
        ({"share": 0.1}, "share: experiments by time give both values the same time"),
        ({"windows": 3}, "windows: unknown field"),
        ({"control": 1.0}, "control: unknown field"),
    ],
)
def test_each_wrong_field_is_named(change, reported):
    with pytest.raises(BadExperiment, match=reported):
        read_spec(GOOD | change, SETTINGS, PRESENT)


@pytest.mark.parametrize("missing", list(GOOD))
def test_each_missing_field_is_named(missing):
    with pytest.raises(BadExperiment, match=f"{missing}: this field is required"):
        read_spec({name: value for name, value in GOOD.items() if name != missing}, SETTINGS, PRESENT)


def test_only_an_object_is_an_experiment():
    with pytest.raises(BadExperiment, match="expected an object"):
        read_spec([], SETTINGS, PRESENT)


SPLIT = {"setting": "draft_tokens", "treatment": 2, "metric": "itl_mean_seconds"}
BOTH = PRESENT | {"draft_tokens": 4, "draft_method": "all"}


def test_the_setting_says_what_may_have_one_value_at_a_time():
    assert read_spec(GOOD, SETTINGS, BOTH).unit == "time"
    assert read_spec(SPLIT, SETTINGS, BOTH).unit == "request"
    assert read_spec(SPLIT | {"unit": "tenant"}, SETTINGS, BOTH).unit == "tenant"
    with pytest.raises(BadExperiment, match="unit: draft_tokens can be compared by request or tenant"):
        read_spec(SPLIT | {"unit": "time"}, SETTINGS, BOTH)
    with pytest.raises(BadExperiment, match="unit: mixed_prefill_ratio can be compared by time"):
        read_spec(GOOD | {"unit": "request"}, SETTINGS, BOTH)
    with pytest.raises(BadExperiment, match=r"metric: expected one of .* did you mean itl_mean_seconds"):
        read_spec(SPLIT | {"metric": "itl_p99_seconds"}, SETTINGS, BOTH)


def test_a_plan_is_read_without_a_server():
    assert read_plan(GOOD).unit == "time"
    assert read_plan(SPLIT).unit == "request"
    with pytest.raises(BadExperiment, match=r"guards\.itl: no such metric"):
        read_plan(SPLIT | {"guards": {"itl": 0.1}})
