"""Folders, the shipped model, and hub names that cannot be had."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from headrace.compute.model.hub import BUILTIN, read_config, resolve_folder
from headrace.compute.model.spec import ModelError


def fail_with(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*args: object, **kwargs: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)


def test_a_folder_is_itself(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert resolve_folder(str(tmp_path)) == tmp_path
    assert read_config(tmp_path) == {}


def test_a_folder_without_config_and_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"not a model folder: it has no config\.json"):
        resolve_folder(str(tmp_path))
    with pytest.raises(ModelError, match="does not exist"):
        resolve_folder(str(tmp_path / "gone"))


def test_a_config_that_is_no_object(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ModelError, match="is not a JSON object"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be read"):
        read_config(tmp_path)


def test_a_config_without_end(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ModelError, match=r"config\.json cannot be read"):
        read_config(tmp_path)


def test_the_builtin_names_lie_in_the_package() -> None:
    import headrace

    for name, folder in BUILTIN.items():
        expected = Path(headrace.__file__).parent / "builtin" / folder
        if expected.is_dir():
            assert resolve_folder(name) == expected


def test_a_hub_name_is_downloaded_without_pickles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    asked: dict[str, object] = {}

    def download(name: str, **options: object) -> str:
        asked.update(options, name=name)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_folder("some/model", "v2") == tmp_path
    assert (asked["name"], asked["revision"]) == ("some/model", "v2")
    assert not any("bin" in str(pattern) for pattern in asked["allow_patterns"])  # type: ignore[attr-defined]


def test_offline_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_with(LocalEntryNotFoundError("no connection"), monkeypatch)
    with pytest.raises(ModelError, match="'some/model' is not a local folder, and the hub cannot be reached"):
        resolve_folder("some/model")


def test_a_malformed_hub_name() -> None:
    with pytest.raises(ModelError, match="neither a folder nor a name on the hub"):
        resolve_folder("no such name!")
