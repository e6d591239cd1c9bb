"""The names of adapters, without a server."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.core.adapters import AdapterError
from headrace.service.adapters import AdapterNames


class Shelf:
    """Every folder has an adapter, whose digest is its name."""

    def add(self, folder: Path) -> str:
        return folder.name

    def retire(self, adapter: str) -> None:
        pass


def test_the_name_of_a_loaded_adapter_is_never_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.service.adapters.MAX_REMEMBERED", 2)
    names = AdapterNames(Shelf(), ())
    loaded = [names.add(f"n{at}", f"/a/{at}") for at in range(5)]
    assert [names.name_of(each.digest) for each in loaded] == ["n0", "n1", "n2", "n3", "n4"]
    for each in loaded[:3]:
        names._drop(each.name)
    assert [names.name_of(each.digest) for each in loaded] == ["", "n1", "n2", "n3", "n4"]


def test_an_adapter_that_is_loaded_again_has_its_present_name() -> None:
    names = AdapterNames(Shelf(), ())
    names.add("old", "/a/0")
    names.add("new", "/a/0")
    names._drop("old")
    assert names.name_of("0") == "new"


def test_the_name_of_another_model_is_refused() -> None:
    with pytest.raises(AdapterError, match="'embed' is that of a served model"):
        AdapterNames(Shelf(), ("m", "embed")).add("embed", "/a/0")


@pytest.mark.parametrize("path", ["/a\0b", "/\ud800", "~no_such_user/a"])
def test_a_path_that_names_no_folder_is_refused(path: str) -> None:
    with pytest.raises(AdapterError, match="the path"):
        AdapterNames(Shelf(), ()).add("n", path)
