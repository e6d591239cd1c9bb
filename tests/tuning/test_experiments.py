import itertools
import json

import pytest

from headrace.core.knobs import Knobs
from headrace.tuning.engine_tuning import MOST_KEPT, Busy, Experiments, Superseded
from headrace.tuning.experiment import Status
from headrace.tuning.settings import changed, live_settings, values
from headrace.tuning.spec import BadExperiment

BODY = {
    "setting": "mixed_prefill_ratio",
    "treatment": 0.4,
    "metric": "output_tokens_per_second",
    "window_seconds": 1.0,
    "burn_in_seconds": 0.5,
    "max_seconds": 60.0,
}
OTHER = BODY | {"setting": "max_num_batched_tokens", "treatment": 512}


class House:
    """A experiments with knobs that are changed as the server changes them."""

    def __init__(self, knobs=None):
        self.settings = live_settings(64)
        self.knobs = knobs or Knobs(mixed_prefill_ratio=0.7)
        numbers = itertools.count()
        self.experiments = Experiments(
            self.settings, lambda: values(self.settings, self.knobs), lambda: f"e{next(numbers)}"
        )
        self.whys = []

    def tick(self, now):
        while (change := self.experiments.tick(now)) is not None:
            self.knobs = changed(self.settings, self.knobs, change.setting, change.value)
            self.whys.append(change.why)

    def live(self, until):
        """Tick whenever something is due."""
        while self.experiments.due() <= until:
            self.tick(self.experiments.due())
        self.tick(until)


def test_a_setting_changes_with_the_arm_and_returns_at_the_end():
    house = House()
    experiment = house.experiments.start(BODY, 0.0)
    seen = set()
    while experiment.status is Status.RUNNING:
        house.tick(experiment.due)
        seen.add((experiment.arm, house.knobs.mixed_prefill_ratio))
    assert seen == {("control", 0.7), ("treatment", 0.4)}
    assert experiment.status is Status.UNDECIDED
    assert house.knobs == Knobs(mixed_prefill_ratio=0.7)
    assert house.whys[-1] in ("experiment e0 ended: undecided", "experiment e0: control")
    assert house.experiments.running is None


def test_one_runs_at_a_time():
    house = House()
    first = house.experiments.start(BODY, 0.0)
    while house.knobs.mixed_prefill_ratio != 0.4:
        house.tick(first.due)
    with pytest.raises(Busy, match="e0 is running"):
        house.experiments.start(OTHER, 9.0)
    house.experiments.stop(first.id, 9.0)
    asked = house.experiments.start(BODY | {"treatment": 0.9}, 9.0)
    assert asked.spec.control == 0.7, "not the treatment of the experiment before"
    house.tick(9.0)
    while house.knobs.mixed_prefill_ratio != 0.9:
        house.tick(asked.due)
    with pytest.raises(Busy, match="stop it first"):
        house.experiments.start(OTHER, 10.0)
    house.experiments.stop(asked.id, 11.0)
    house.tick(11.0)
    assert house.knobs.mixed_prefill_ratio == 0.7
    assert [each.id for each in house.experiments.all()] == [asked.id, first.id]


def test_a_value_out_of_bounds_is_refused():
    house = House()
    with pytest.raises(BadExperiment, match="max_num_batched_tokens 8 is not between 64"):
        house.experiments.start(OTHER | {"treatment": 8}, 0.0)
    with pytest.raises(BadExperiment, match="whole number"):
        house.experiments.start(OTHER | {"treatment": 512.5}, 0.0)
    assert house.experiments.all() == []


def test_experiments_survive_a_restart():
    house = House()
    experiment = house.experiments.start(BODY, 0.0)
    house.live(20.0)
    pairs = len(experiment.pairs)
    stored = json.loads(house.experiments.stored(20.0))
    again = House()
    assert again.experiments.restore(stored, 7.0) == []
    again.live(40.0)
    assert len(again.experiments.get("e0").pairs) > pairs
    changed_since = House(Knobs(mixed_prefill_ratio=0.5))
    (reported,) = changed_since.experiments.restore(stored, 7.0)
    assert "mixed_prefill_ratio is 0.5 since the restart" in reported
    assert changed_since.experiments.running is None


def test_an_adopted_value_stays():
    house = House()
    experiment = house.experiments.start(BODY | {"adopt": True}, 0.0)
    while house.knobs.mixed_prefill_ratio != 0.4:
        house.tick(experiment.due)
    experiment.stop(Status.BETTER, "test", 5.0)
    house.tick(5.0)
    assert house.knobs.mixed_prefill_ratio == 0.4
    later = house.experiments.start(BODY | {"treatment": 0.2}, 6.0)
    assert later.spec.control == 0.4


def adopted(house):
    experiment = house.experiments.start(BODY | {"adopt": True}, 0.0)
    house.tick(0.0)
    experiment.stop(Status.BETTER, "test", 5.0)
    house.tick(5.0)
    assert house.knobs.mixed_prefill_ratio == 0.4
    return experiment


def test_an_adopted_value_is_rolled_back():
    house = House()
    experiment = adopted(house)
    for number in range(3):  # it is not among the newest two any more
        other = house.experiments.start(OTHER, 6.0 + number)
        with pytest.raises(Busy, match="is running"):
            house.experiments.stop(experiment.id, 6.0)
        house.experiments.stop(other.id, 6.0 + number)
        house.tick(6.0 + number)
    assert house.experiments.stop(experiment.id, 10.0) is experiment
    assert house.experiments.pending
    house.tick(10.0)
    assert house.knobs.mixed_prefill_ratio == 0.7
    assert (experiment.status, experiment.why) == (Status.ROLLED_BACK, "rolled back on request")
    assert not house.experiments.pending
    stored = json.loads(house.experiments.stored(11.0))
    again = House()
    again.experiments.restore(stored, 0.0)
    again.tick(1.0)
    assert again.knobs.mixed_prefill_ratio == 0.7, "it stays rolled back after a restart"


def test_an_adopted_value_that_a_later_experiment_changed_is_not_rolled_back():
    house = House()
    experiment = adopted(house)
    later = house.experiments.start(BODY | {"treatment": 0.2}, 6.0)
    house.experiments.stop(later.id, 7.0)
    with pytest.raises(Superseded, match=f"experiment {later.id} changed mixed_prefill_ratio later"):
        house.experiments.stop(experiment.id, 8.0)
    assert experiment.status is Status.BETTER


def test_an_ended_experiment_is_written_as_text_once(monkeypatch):
    """Each of a hundred may hold some thousand windows, and the file follows every measurement of the running one."""
    house = House()
    ended = adopted(house)
    running = house.experiments.start(OTHER, 6.0)
    first = json.loads(house.experiments.stored(7.0))
    assert [each["id"] for each in first] == [ended.id, running.id]
    monkeypatch.setattr(ended, "to_json", lambda now: pytest.fail("written again"))
    house.experiments.stop(running.id, 8.0)
    second = json.loads(house.experiments.stored(9.0))
    assert (second[0], second[1]["status"]) == (first[0], "stopped")
    monkeypatch.undo()
    house.experiments.stop(ended.id, 10.0)
    house.tick(10.0)
    third = json.loads(house.experiments.stored(11.0))[0]
    assert (third["status"], third["log"][-1][1]) == ("rolled_back", "mixed_prefill_ratio is 0.7")


def restarted(house, knobs=None):
    """A house that has read the file of another one, and the messages about it."""
    stored = json.loads(house.experiments.stored(20.0))
    again = House(knobs)
    return again, again.experiments.restore(stored, 0.0)


def test_an_adopted_value_is_set_again_after_a_restart_however_many_experiments_came_later():
    house = House()
    experiment = adopted(house)
    for number in range(MOST_KEPT + 2):
        house.experiments.stop(house.experiments.start(OTHER, 6.0 + number).id, 6.0 + number)
        house.tick(6.0 + number)
    assert len(house.experiments.all()) == MOST_KEPT
    again, messages = restarted(house)
    again.tick(0.0)
    assert messages == []
    assert again.knobs.mixed_prefill_ratio == 0.4
    again.experiments.stop(experiment.id, 1.0)
    again.tick(1.0)
    assert again.knobs.mixed_prefill_ratio == 0.7


def test_an_experiment_against_an_adopted_value_continues_after_a_restart():
    house = House()
    adopted(house)
    later = house.experiments.start(BODY | {"treatment": 0.2}, 6.0)
    house.live(20.0)
    again, messages = restarted(house)
    assert messages == []
    assert again.experiments.running.id == later.id
    again.tick(0.0)
    assert again.knobs.mixed_prefill_ratio in (0.4, 0.2)
    again.experiments.stop(later.id, 1.0)
    again.tick(1.0)
    assert again.knobs.mixed_prefill_ratio == 0.4


def test_a_configured_value_counts_more_than_an_adopted_one():
    house = House()
    experiment = adopted(house)
    again, (message,) = restarted(house, Knobs(mixed_prefill_ratio=0.5))
    again.tick(0.0)
    assert again.knobs.mixed_prefill_ratio == 0.5
    assert (
        message
        == f"experiment {experiment.id} rolled_back: mixed_prefill_ratio is 0.5 since the restart, not 0.7"
    )
    assert again.experiments.get(experiment.id).status is Status.ROLLED_BACK
    same, messages = restarted(house, Knobs(mixed_prefill_ratio=0.4))
    same.tick(0.0)
    assert messages == []
    assert same.experiments.get(experiment.id).adopted
    same.experiments.stop(experiment.id, 1.0)
    same.tick(1.0)
    assert same.knobs.mixed_prefill_ratio == 0.7


def test_a_treatment_that_is_out_of_bounds_after_a_restart_is_not_set():
    running = House()
    running.experiments.start(BODY | {"setting": "max_running", "treatment": 40}, 0.0)
    keeping = House()
    kept = keeping.experiments.start(BODY | {"setting": "max_running", "treatment": 40, "adopt": True}, 0.0)
    kept.stop(Status.BETTER, "test", 5.0)
    for house, status in ((running, Status.STOPPED), (keeping, Status.ROLLED_BACK)):
        again = House()
        again.settings.update(live_settings(8))
        (message,) = again.experiments.restore(json.loads(house.experiments.stored(6.0)), 0.0)
        assert "max_running 40 is not between 0 and 8" in message
        again.tick(0.0)
        assert again.experiments.get("e0").status is status
        assert again.knobs.max_running == 0
