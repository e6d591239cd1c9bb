"""Finds a model: a folder, the model that ships with the package, or a name on the Hugging Face hub.

It reads only ``config.json``; `families` and `weights` read the rest.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

from headrace.compute.model.spec import ModelError
from headrace.files import read_json_file

BUILTIN = {"builtin": "target", "builtin-draft": "draft"}
"""Names of the packaged models, and their folders under ``headrace/builtin``."""

_WEIGHTS = "*.safetensors"
_WANTED = ["*.json", "*.jinja", "merges.txt", "tokenizer*"]
_UNWANTED = ["original/*", "consolidated*", "*.gguf", "onnx/*"]


def resolve_folder(name: str, revision: str | None = None, *, with_weights: bool = True) -> Path:
    """The local folder of a model, downloaded first if ``name`` is a hub name (``Qwen/Qwen3-0.6B``).

    Args:
        name: a folder, "builtin", "builtin-draft", or a hub name.
        revision: branch, tag or commit on the hub; hub names only.
        with_weights: False skips the weights, if only shapes or the tokenizer are needed.

    Raises:
        ModelError: the model does not exist, or the hub cannot be reached and there is no local copy.
    """
    if name in BUILTIN:
        return _with_config(Path(str(files("headrace"))) / "builtin" / BUILTIN[name])
    folder = Path(name).expanduser()
    if folder.is_dir():
        return _with_config(folder)
    if name.count("/") > 1 or name.startswith((".", "~", "/")):
        raise ModelError(f"model folder {folder} does not exist")
    return _with_config(_download(name, revision, with_weights))


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's ``config.json``.

    Raises:
        ModelError: the file is missing or is not a JSON object.
    """
    path = folder / "config.json"
    try:
        config = read_json_file(path)
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path} is not a JSON object")
    return config


def _with_config(folder: Path) -> Path:
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} is not a model folder: it has no config.json")
    return folder


def _download(name: str, revision: str | None, with_weights: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        wanted = [*_WANTED, _WEIGHTS] if with_weights else _WANTED
        return Path(
            snapshot_download(name, revision=revision, allow_patterns=wanted, ignore_patterns=_UNWANTED)
        )
    except GatedRepoError as error:
        raise ModelError(
            f"{name} requires accepting an agreement on the hub: accept it, then log in with `hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"the hub has no model '{name}', or it is private and needs `hf auth login`"
        ) from error
    except RevisionNotFoundError as error:
        raise ModelError(f"model '{name}' has no revision '{revision}'") from error
    except HFValidationError as error:
        raise ModelError(
            f"'{name}' is neither a folder nor a name on the hub: {_first_line(error)}"
        ) from error
    except (LocalEntryNotFoundError, OSError) as error:
        raise ModelError(
            f"'{name}' is not a local folder, and the hub cannot be reached ({_first_line(error)}); "
            "use a local folder, or 'builtin' for the model that ships with the package"
        ) from error


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
