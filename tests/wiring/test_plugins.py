"""Plug-ins are found by module and class or by entry point, and a fault is one line that names what is missing."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace

import pytest

from headrace.config import ConfigError, SchedulerOptions
from headrace.core.knobs import Knobs
from headrace.core.memory.eviction import CostAwareEviction, LeastRecentlyUsed
from headrace.core.prediction.step_curve import TOKENS_ONLY
from headrace.core.queueing.order import ByPriority
from headrace.core.scheduler.admission import StaticBatch
from headrace.core.scheduler.victims import LastRanked, LowestRecomputeCost
from headrace.core.tenancy.tenants import CLASSES
from headrace.wiring import plugins
from headrace.wiring.caches import STORE
from headrace.wiring.engine import (
    ADMISSION,
    EVICTION,
    ORDER,
    VICTIM,
    check_policies,
    make_admission,
    make_eviction,
    make_order,
    make_victims,
)
from headrace.wiring.plugins import find_class, make_plugin, name_of

MODULE = """
class Shortest:
    def __init__(self, seconds):
        self.seconds = seconds
    def rank(self, request, number):
        return (self.seconds(request), number)

class Plain:
    @staticmethod
    def rank(request, number):
        return (number,)

class NoRank:
    def order(self, request, number): ...

class OneArgument:
    def rank(self, request): ...

class NeedsModel:
    def __init__(self, model): ...
    def rank(self, request, number): ...

class Fails:
    def __init__(self):
        raise OSError("no disk")
    def rank(self, request, number): ...

class SyncStore:
    name = "sync"
    def get(self, key): ...

class Outer:
    class Inner(Plain): ...

def function(request, number): ...
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with modules, in which the process works."""
    (tmp_path / "my_policies.py").write_text(MODULE)
    (tmp_path / "broken_policies.py").write_text("import no_such_library\n")
    (tmp_path / "wrong_policies.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("my_policies", "broken_policies", "wrong_policies"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def test_a_class_gets_what_its_constructor_asks_for():
    made = make_plugin(ORDER, "my_policies:Shortest", seconds=len, unused=3)
    assert made.rank("four", 7) == (4, 7)
    assert make_plugin(ORDER, "my_policies:Plain", seconds=len).rank("", 1) == (1,)
    assert make_plugin(ORDER, "my_policies:Outer.Inner").rank("", 1) == (1,)


@pytest.mark.parametrize(
    ("name", "reported"),
    [
        (
            "shortst",
            r"--queue-order shortst: expected one of auto, arrival, prefix, shortest, or MODULE:CLASS; did you mean",
        ),
        ("no_such_module:Order", r"--queue-order no_such_module:Order: there is no module 'no_such_module'"),
        ("my_policies.deep:Order", "importing my_policies.deep failed|there is no module 'my_policies.deep'"),
        ("broken_policies:Order", "importing broken_policies failed: No module named 'no_such_library'"),
        ("wrong_policies:Order", "importing wrong_policies failed: ZeroDivisionError"),
        ("my_policies:Shorest", "my_policies has no class 'Shorest'; did you mean Shortest"),
        ("my_policies:function", "expected a class, but it is a function"),
        ("my_policies:NoRank", r"the method rank\(request, number\) is missing"),
        ("my_policies:OneArgument", r"must accept rank\(request, number\), but it is rank\(self, request\)"),
        (
            "my_policies:NeedsModel",
            r"the constructor requires 'model', which is not offered \(offered: seconds\)",
        ),
        ("my_policies:Fails", "the constructor failed: OSError: no disk"),
    ],
)
def test_faults_are_named(name, reported):
    with pytest.raises(ConfigError, match=reported) as raised:
        make_plugin(ORDER, name, seconds=len)
    assert "\n" not in str(raised.value)


def test_a_store_must_be_async_and_named():
    with pytest.raises(ConfigError, match=r"the method get\(key\) must be 'async def'"):
        find_class(STORE, "my_policies:SyncStore")


@pytest.mark.parametrize("port", [ORDER, ADMISSION, VICTIM, EVICTION, STORE])
def test_entry_points_are_found_by_name(port, monkeypatch):
    def entry_points(group: str) -> list[EntryPoint]:
        return [EntryPoint("mine", "my_policies:Plain", group)] if group == ORDER.group else []

    monkeypatch.setattr(plugins, "entry_points", entry_points)
    if port is ORDER:
        assert find_class(port, "mine").__name__ == "Plain"
    else:
        with pytest.raises(ConfigError, match=f"{port.flag} mine: expected one of"):
            find_class(port, "mine")


def test_a_class_has_a_name_by_which_it_is_found():
    assert find_class(ORDER, name_of(ByPriority)) is ByPriority

    class Local(ByPriority):
        pass

    with pytest.raises(ConfigError, match="inside a function"):
        name_of(Local)


def test_policies_are_checked_before_a_model_is_loaded():
    check_policies(SchedulerOptions())
    for name in ("queue_order", "admission_policy", "victim_policy", "eviction_policy"):
        flag = "--" + name.replace("_", "-")
        with pytest.raises(ConfigError, match=f"{flag} nothing: expected one of"):
            check_policies(SchedulerOptions(**{name: "nothing"}))


def test_an_order_that_the_policy_would_ignore_is_refused():
    check_policies(SchedulerOptions(queue_order="shortest"))
    for order in ("prefix", "shortest"):
        with pytest.raises(
            ConfigError, match=f"{order} needs --scheduling-policy fair; fcfs has its own order"
        ):
            check_policies(SchedulerOptions(queue_order=order, scheduling_policy="fcfs"))


@pytest.mark.parametrize("policy", ["fair", "fcfs", "priority"])
def test_a_plugged_in_order_replaces_that_of_every_scheduling_policy(policy):
    plans = SchedulerOptions(scheduling_policy=policy, queue_order="my_policies:Shortest")
    made = make_order(plans, SimpleNamespace(work_seconds=len), Knobs)
    assert made.rank("four", 7) == (4, 7)


def test_names_choose_other_policies_than_the_scheduling_policy_implies():
    plans = SchedulerOptions(scheduling_policy="fair", admission_policy="static", victim_policy="last-ranked")
    assert type(make_admission(plans)) is StaticBatch
    assert type(make_victims(plans, TOKENS_ONLY, CLASSES)) is LastRanked
    assert type(make_eviction(SchedulerOptions(eviction_policy="lru"), 8, 2.0)) is LeastRecentlyUsed
    assert type(make_eviction(SchedulerOptions(), 8, 2.0)) is CostAwareEviction
    usual = SchedulerOptions(scheduling_policy="static")
    assert type(make_admission(usual)) is StaticBatch
    assert type(make_victims(usual, TOKENS_ONLY, CLASSES)) is LastRanked
    assert type(make_victims(SchedulerOptions(), TOKENS_ONLY, CLASSES)) is LowestRecomputeCost
