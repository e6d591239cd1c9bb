"""Folders, the shipped model, and hub names that cannot be had."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from headrace.compute.checkpoint import ModelError
from headrace.compute.model.hub import BUILTIN, model_name, read_config, resolve_folder, resolve_model


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


class Hub:
    """A fake hub: the files of one repository, in a local folder."""

    def __init__(self, folder: Path, names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.names, self.wanted, self.reachable = folder, names, [""], True
        monkeypatch.setattr(huggingface_hub, "model_info", self.model_info)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", self.snapshot_download)

    def model_info(self, repository: str, **options: object) -> SimpleNamespace:
        if not self.reachable:
            raise RuntimeError("no connection")
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=name) for name in self.names])

    def snapshot_download(
        self, repository: str, *, allow_patterns: list[str] | None = None, **options: object
    ) -> str:
        self.wanted = allow_patterns or self.wanted
        return str(self.folder)


QUANTS = [
    "README.md",
    "config.json",
    "mmproj-model-F16.gguf",
    "model-Q4_K_M.gguf",
    "model-Q8_0.gguf",
    "UD-Q4_K_XL/model-UD-Q4_K_XL-00001-of-00002.gguf",
    "UD-Q4_K_XL/model-UD-Q4_K_XL-00002-of-00002.gguf",
    "model.IQ3_XS.gguf",
]


@pytest.mark.parametrize(
    ("quantization", "files"),
    [
        ("Q4_K_M", QUANTS[3:4]),
        ("q8_0", QUANTS[4:5]),
        ("UD-Q4_K_XL", QUANTS[5:7]),
        ("IQ3_XS", QUANTS[7:8]),
    ],
)
def test_one_quantization_of_a_repository_is_downloaded(
    quantization: str, files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = Hub(tmp_path, QUANTS, monkeypatch)
    assert resolve_model(f"org/model-GGUF:{quantization}") == tmp_path / files[0]
    assert hub.wanted == files


def test_the_only_gguf_model_of_a_repository_needs_no_quantization(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Hub(tmp_path, ["some-model.gguf", "mmproj.gguf"], monkeypatch)
    assert resolve_model("org/model-gguf") == tmp_path / "some-model.gguf"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (
            "org/m-GGUF:Q5_K_M",
            "has no GGUF models Q5_K_M; there are: IQ3_XS, Q4_K_M, Q8_0, UD-Q4_K_XL; write org/m-GGUF:",
        ),
        ("org/m-GGUF", "has several GGUF models; there are: IQ3_XS, Q4_K_M, Q8_0"),
    ],
)
def test_the_error_lists_what_the_repository_has(
    name: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Hub(tmp_path, QUANTS, monkeypatch)
    with pytest.raises(ModelError, match=reason):
        resolve_model(name)


def test_a_repository_without_gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Hub(tmp_path, ["model.safetensors"], monkeypatch)
    with pytest.raises(ModelError, match="org/m has no GGUF files; leave ':Q8_0' out"):
        resolve_model("org/m:Q8_0")


def test_without_the_hub_what_was_downloaded_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub(tmp_path, [], monkeypatch)
    hub.reachable = False
    (tmp_path / "model-Q8_0.gguf").touch()
    assert resolve_model("org/model-GGUF:Q8_0") == tmp_path / "model-Q8_0.gguf"


def test_a_gguf_file_and_a_folder_with_one(tmp_path: Path) -> None:
    path = tmp_path / "model-Q4_0-00001-of-00002.gguf"
    for name in (path.name, "model-Q4_0-00002-of-00002.gguf", "mmproj-model.gguf"):
        (tmp_path / name).touch()
    assert resolve_model(str(path)) == resolve_model(str(tmp_path)) == path
    assert model_name(path) == "model-Q4_0"
    (tmp_path / "other.gguf").touch()
    with pytest.raises(
        ModelError, match=r"several GGUF models; name one of them: model-Q4_0-00001-of-00002\.gguf, other"
    ):
        resolve_model(str(tmp_path))
    with pytest.raises(ModelError, match=r"model file .*gone\.gguf does not exist"):
        resolve_model(str(tmp_path / "gone.gguf"))


def test_what_needs_a_folder_refuses_a_file(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ModelError, match="is a GGUF file, which cannot be used for this"):
        resolve_folder(str(tmp_path / "model.gguf"))
