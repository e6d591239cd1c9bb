"""Each check fails for a workload that breaks its rule, and every built-in dataset passes."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from headrace.lab.workload.dataset import DATASETS, Dataset
from headrace.lab.workload.work import Work
from headrace.testing import check_workload


class Fixed:
    def draw(self, dataset: Dataset) -> list[Work]:
        return [Work(f"w{i}", "Hello", 4) for i in range(dataset.count)]


class TooFew(Fixed):
    def draw(self, dataset):
        return super().draw(dataset)[1:]


class Twice(Fixed):
    def draw(self, dataset):
        return [replace(each, id="w") for each in super().draw(dataset)]


class Other(Fixed):
    def draw(self, dataset):
        return [replace(each, max_tokens=random.randrange(1, 10**9)) for each in super().draw(dataset)]


class BuiltIn:
    def __init__(self, name: str) -> None:
        self.name = name

    def draw(self, dataset: Dataset) -> tuple[Work, ...]:
        return replace(dataset, name=self.name).draw()


def test_a_good_workload_passes():
    check_workload(Fixed)


@pytest.mark.parametrize("name", [name for name in DATASETS if name not in ("jsonl", "trace")])
def test_built_in_workloads_pass(name):
    check_workload(lambda: BuiltIn(name))


@pytest.mark.parametrize(
    ("kind", "reported"),
    [(TooFew, "19 requests drawn, expected 20"), (Twice, "the same id"), (Other, "draws other requests")],
)
def test_bad_workloads_fail(kind, reported):
    with pytest.raises(AssertionError, match=reported):
        check_workload(kind)
