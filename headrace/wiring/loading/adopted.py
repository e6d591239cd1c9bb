"""Loads a model that transformers defines: see `headrace.compute.adopted`, which is imported only for such a model."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.compute.model.shape import ModelShape
from headrace.compute.model.sharding import EXPERT, PIPELINE, TENSOR
from headrace.compute.quantization.scheme import SCHEMES
from headrace.config import ConfigError, ModelOptions
from headrace.wiring.loading.found import Choices, Opened

if TYPE_CHECKING:
    from headrace.compute.adopted.loading import Adoptable


@dataclass(frozen=True, slots=True)
class AdoptedModel:
    """A model in a folder that transformers defines; ``why`` says why it is not of a native family."""

    found: Adoptable
    why: str

    @property
    def shape(self) -> ModelShape:
        """Its sizes; its layers are an estimate until it is loaded."""
        return self.found.shape

    @property
    def stored_quantized(self) -> bool:
        """Whether linear layers are stored quantized."""
        return self.found.stored is not None

    def check(self, model: ModelOptions) -> None:
        """Raise ConfigError for options that need a native family."""
        for option, size in (
            (TENSOR, model.tensor_parallel_size),
            (PIPELINE, model.pipeline_parallel_size),
        ):
            if size > 1:
                raise ConfigError(
                    f"{option} {size}: {self.shape.architecture} is computed by transformers' code, which runs in one"
                    " process; omit this option"
                )
        if model.enable_expert_parallel:
            raise ConfigError(f"{EXPERT}: {self.shape.architecture} runs in one process; omit this option")

    def open(self, model: ModelOptions, chosen: Choices, *, with_fingerprint: bool) -> Opened:
        """See `FoundModel.open`."""
        from headrace.compute.adopted.loading import load_adopted

        scheme = model.quantization
        loaded = load_adopted(
            self.found,
            chosen.kernels,
            chosen.dtype.dtype,
            chosen.device,
            chosen.max_model_len,
            model.seed if model.load_format == "dummy" else None,
            scheme=SCHEMES[scheme] if scheme else None,
            with_digest=with_fingerprint,
        )
        fingerprint = ""
        if with_fingerprint:
            config = json.dumps(self.found.config.to_dict(), sort_keys=True, default=str)
            described = "transformers", version("transformers"), scheme, loaded.digest, config
            fingerprint = hashlib.sha256(repr(described).encode()).hexdigest()
        decoder = loaded.decoder
        kernels = ", ".join(["attention", *(f"{kind} ({count})" for kind, count in loaded.replaced.items())])
        note = (
            f"modelling code of transformers {version('transformers')}, {self.why}; by the kernels: {kernels}"
        )
        stored = self.found.stored
        held = stored.name if stored else scheme
        quantization = f"linear layers in {held}" if held else ""
        return Opened(decoder.shape, decoder, None, quantization, fingerprint, (note,))


def find_adopted(folder: Path, why: str) -> AdoptedModel:
    """The model in a folder, as transformers defines it.

    Raises:
        ConfigError: transformers is not installed.
        ModelError: transformers has no such model, or one that cannot be served.
    """
    try:
        from headrace.compute.adopted.loading import read_adoptable
    except ModuleNotFoundError as error:
        raise ConfigError(f"--model-impl: models of transformers need the package {error.name}") from error
    return AdoptedModel(read_adoptable(folder), why)
