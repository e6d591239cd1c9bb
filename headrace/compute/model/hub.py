"""Finds a model: a folder, a GGUF file, the model that ships with the package, or a name on the Hugging Face hub.

It reads only the config; `families` and `weights` read the rest.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path, PurePosixPath
from typing import Any

from headrace.compute.checkpoint import ModelError
from headrace.compute.model.gguf.config import config_of
from headrace.compute.model.gguf.file import GgufFile, is_gguf
from headrace.files import read_json_file

BUILTIN = {"builtin": "target", "builtin-draft": "draft"}
"""Names of the packaged models, and their folders under ``headrace/builtin``."""

_WEIGHTS = "*.safetensors"
_WANTED = ["*.json", "*.jinja", "merges.txt", "tokenizer*"]
_UNWANTED = ["original/*", "consolidated*", "*.gguf", "onnx/*"]


_QUANT = re.compile(
    r"(?i)(?:^|[-._])((?:UD-)?(?:(?:IQ|Q|TQ)\d[0-9A-Z_]*|MXFP4[0-9A-Z_]*|BF16|F16|FP16|F32))$"
)
"""The name of the quantization at the end of a GGUF file's name."""
_PART = re.compile(r"-(\d{5})-of-\d{5}$")
_HUB_SECONDS = 10.0
"""Time limit of the list of a repository's files."""


def resolve_model(name: str, revision: str | None = None, *, with_weights: bool = True) -> Path:
    """The local folder or GGUF file of a model, downloaded first if ``name`` is a hub name.

    Args:
        name: a folder, a GGUF file (the first one of a split model), "builtin", "builtin-draft", a hub name
            (``Qwen/Qwen3-0.6B``), or one with the quantization to take (``org/name-GGUF:Q4_K_M``).
        revision: branch, tag or commit on the hub; hub names only.
        with_weights: False skips the weights of safetensors, if only shapes or the tokenizer are needed.

    Raises:
        ModelError: the model does not exist, several could be meant, or the hub cannot be reached and there is no local
            copy.
    """
    if name in BUILTIN:
        return _with_config(Path(str(files("headrace"))) / "builtin" / BUILTIN[name])
    path = Path(name).expanduser()
    if path.is_dir():
        return _with_config(path) if (path / "config.json").is_file() else _only_gguf(path)
    if is_gguf(path):
        if not path.is_file():
            raise ModelError(f"model file {path} does not exist")
        return path
    if name.count("/") > 1 or name.startswith((".", "~", "/")):
        raise ModelError(f"model folder {path} does not exist")
    repository, _, quantization = name.partition(":")
    if quantization or repository.lower().endswith("gguf"):
        return _download_gguf(repository, quantization, revision)
    return _with_config(_download(name, revision, with_weights))


def resolve_folder(name: str, revision: str | None = None, *, with_weights: bool = True) -> Path:
    """As `resolve_model`, for what reads a folder in Hugging Face layout.

    Raises:
        ModelError: as there, or the model is a GGUF file.
    """
    path = resolve_model(name, revision, with_weights=with_weights)
    if is_gguf(path):
        raise ModelError(
            f"{name} is a GGUF file, which cannot be used for this; give the model in safetensors"
        )
    return path


def read_config(path: Path) -> dict[str, Any]:
    """The ``config.json`` of a folder, or the same fields from the metadata of a GGUF file.

    Raises:
        ModelError: the file is missing or is not a JSON object, or the metadata describe no supported model.
    """
    return config_of(GgufFile.open(path)) if is_gguf(path) else _read_json(path / "config.json")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        config = read_json_file(path)
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path} is not a JSON object")
    return config


def model_name(path: Path) -> str:
    """The name of the model in a GGUF file: that of the file, without its ending and the number of a part."""
    return _PART.sub("", path.stem)


def _with_config(folder: Path) -> Path:
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} is not a model folder: it has no config.json")
    return folder


def _only_gguf(folder: Path) -> Path:
    """The GGUF model in a folder without a config."""
    names = _models(path.name for path in folder.glob("*.gguf"))
    if len(names) > 1:
        raise ModelError(f"{folder} has several GGUF models; name one of them: {', '.join(sorted(names))}")
    return folder / names[0] if names else _with_config(folder)


def _models(names: Iterable[str]) -> list[str]:
    """The GGUF files that are models: the first file of a split one, and no image encoders beside a model."""
    models = []
    for name in sorted(names):
        path = PurePosixPath(name)
        part = _PART.search(path.stem)
        if is_gguf(path) and not path.name.startswith("mmproj") and (part is None or part[1] == "00001"):
            models.append(name)
    return models


def _quantization(name: str) -> str:
    """The quantization that the name of a GGUF file says; empty: none."""
    found = _QUANT.search(_PART.sub("", PurePosixPath(name).stem))
    return found[1].upper() if found else ""


def _download_gguf(repository: str, quantization: str, revision: str | None) -> Path:
    """The GGUF file of a repository in a quantization, or its only one; for a split model the first of its files."""
    from huggingface_hub import snapshot_download

    with _hub_errors(repository, revision):
        names = _listed(repository, revision)
        chosen = _chosen(repository, quantization, _models(names))
        stem = _PART.sub("", chosen.removesuffix(".gguf"))
        parts = [
            name for name in names if name == chosen or _PART.sub("", name.removesuffix(".gguf")) == stem
        ]
        return Path(snapshot_download(repository, revision=revision, allow_patterns=parts)) / chosen


def _listed(repository: str, revision: str | None) -> list[str]:
    """The files of a repository; if the hub cannot be reached, those that were downloaded before."""
    from huggingface_hub import model_info, snapshot_download
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        found = model_info(repository, revision=revision, timeout=_HUB_SECONDS).siblings or ()
        return [each.rfilename for each in found]
    except (HFValidationError, RepositoryNotFoundError, RevisionNotFoundError):
        raise
    except Exception:  # the HTTP client of the library has types of its own
        cached = Path(snapshot_download(repository, revision=revision, local_files_only=True))
        return [path.relative_to(cached).as_posix() for path in cached.rglob("*.gguf")]


def _chosen(repository: str, quantization: str, models: list[str]) -> str:
    """The model with a quantization among the GGUF models of a repository; without one, the only model."""
    if not models:
        raise ModelError(
            f"{repository} has no GGUF files; leave ':{quantization}' out, or name a repository with them"
        )
    wanted = [each for each in models if not quantization or _quantization(each) == quantization.upper()]
    if len(wanted) == 1:
        return wanted[0]
    there = sorted({_quantization(each) or each for each in models})
    which = f"{len(wanted) or 'no'} GGUF models {quantization}" if quantization else "several GGUF models"
    raise ModelError(
        f"{repository} has {which}; there are: {', '.join(there)}; write {repository}:{there[0]}"
    )


def _download(name: str, revision: str | None, with_weights: bool) -> Path:
    from huggingface_hub import snapshot_download

    with _hub_errors(name, revision):
        wanted = [*_WANTED, _WEIGHTS] if with_weights else _WANTED
        return Path(
            snapshot_download(name, revision=revision, allow_patterns=wanted, ignore_patterns=_UNWANTED)
        )


@contextmanager
def _hub_errors(name: str, revision: str | None) -> Iterator[None]:
    """Turn the hub's errors into a `ModelError` that says what to do."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        yield
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
