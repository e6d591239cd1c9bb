"""The settings of requests under an experiment: who has the treatment, and what is left of it at the end."""

import itertools

import pytest

from headrace.core.knobs import Knobs
from headrace.core.request import NO_SETTINGS, Request
from headrace.tuning.engine_tuning import EngineTuning, Requests
from headrace.tuning.experiment import Status
from headrace.tuning.settings import live_settings, request_settings
from headrace.tuning.spec import BadExperiment
from headrace.tuning.tuner import Mode

BODY = {"setting": "draft_method", "treatment": "none", "metric": "itl_mean_seconds"}


def tuning():
    numbers = itertools.count()
    known = request_settings(("ngram", "draft_model"), 8, semantic=False)
    start = {"draft_method": "all", "draft_tokens": 8, "request_timeout": 600.0}
    requests = Requests(known, start)
    return EngineTuning(live_settings(64), Knobs, lambda: f"e{next(numbers)}", requests=requests)


def requests(arrived):
    return [Request(f"r{n}", (1,), arrived=arrived) for n in range(200)]


def test_requests_have_the_settings_of_the_server_unless_an_experiment_runs():
    steers = tuning()
    assert steers.watchers == ()
    assert all(steers.assigned(each) is each for each in requests(0.0))
    experiment = steers.experiments.start(BODY, 5.0)
    assert steers.watchers == (experiment.meter,)
    assert steers.tick(5.0) is None
    treated = [steers.assigned(each).settings.draft_method == "none" for each in requests(5.0)]
    assert treated == [experiment.assignment.treats(f"r{n}") for n in range(200)]
    assert 60 < sum(treated) < 140
    steers.experiments.stop(experiment.id, 6.0)
    assert steers.watchers == ()
    assert all(steers.assigned(each).settings is NO_SETTINGS for each in requests(6.0))


def test_an_adopted_value_is_what_all_requests_have():
    steers = tuning()
    experiment = steers.experiments.start(BODY | {"adopt": True}, 0.0)
    experiment.stop(Status.BETTER, "test", 1.0)
    assert steers.tick(1.0) is None, "nothing of the engine changes"
    assert {steers.assigned(each).settings.draft_method for each in requests(2.0)} == {"none"}
    assert steers.all_present()["draft_method"] == "none"
    assert steers.experiments.start(BODY | {"treatment": "ngram"}, 3.0).spec.control == "none"


def test_wrong_values_are_named():
    steers = tuning()
    with pytest.raises(BadExperiment, match="draft_method must be one of all, none, ngram, draft_model"):
        steers.experiments.start(BODY | {"treatment": "suffix"}, 0.0)
    with pytest.raises(BadExperiment, match="draft_tokens 9 is not between 0 and 8"):
        steers.experiments.start(BODY | {"setting": "draft_tokens", "treatment": 9}, 0.0)


def test_the_settings_are_described_with_their_units():
    described = tuning().describe()
    assert described["draft_method"]["choices"] == ["all", "none", "ngram", "draft_model"]
    assert described["draft_tokens"] | {"help": ""} == {
        "value": 8,
        "low": 0,
        "high": 8,
        "help": "",
        "units": ["request", "tenant"],
    }
    assert described["max_running"]["units"] == ["time"]
    assert "semantic_min_similarity" not in described


def test_a_tuner_that_is_off_sees_no_events_and_begins_anew():
    steers = tuning()
    steers.tuner.set_mode(Mode.ADVISE, 1.0)
    first = steers.tuner.history
    assert steers.watchers == (first,)
    steers.tuner.set_mode(Mode.OFF, 2.0)
    assert steers.watchers == ()
    steers.tuner.set_mode(Mode.ON, 3.0)
    (again,) = steers.watchers
    assert again is not first
