"""Loads a model of one of this project's families: whole, or rank 0's part of it, and then starts the other ranks."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch

from headrace.compute.model.decoder import Decoder
from headrace.compute.model.shape import ModelShape
from headrace.compute.model.sharding import Place, check_sizes, shard_of
from headrace.compute.model.spec import DecoderSpec
from headrace.compute.model.weights import DecoderWeights, kv_fingerprint
from headrace.compute.parallel import ONE_PROCESS
from headrace.config import ConfigError, ModelOptions
from headrace.fleet.leader import Leader
from headrace.fleet.others import RankFailed
from headrace.fleet.setup import ModelSetup, dtype_name, identity
from headrace.fleet.worker import load_part
from headrace.wiring.loading.found import Choices, Opened
from headrace.wiring.loading.ranks import open_others, place_of, size_option


@dataclass(frozen=True, slots=True)
class NativeModel:
    """A model of a native family in a folder."""

    folder: Path
    spec: DecoderSpec

    @property
    def shape(self) -> ModelShape:
        """Its sizes."""
        return self.spec.shape

    @property
    def stored_quantized(self) -> bool:
        """Whether its linears are stored in a quantized format."""
        return self.spec.stored is not None

    def check(self, model: ModelOptions) -> None:
        """Raise ModelError if the model cannot be divided as the options ask."""
        check_sizes(self.spec, place_of(model))

    def open(self, model: ModelOptions, chosen: Choices, *, with_fingerprint: bool) -> Opened:
        """See `FoundModel.open`."""
        place = place_of(model)
        setup = self._setup(model, place, chosen, with_fingerprint=with_fingerprint)
        kernels, length, leader = chosen.kernels, chosen.max_model_len, None
        try:
            if place.size > 1:
                leader = Leader(open_others(model), setup, self.spec.vocab_size, chosen.device)
                leader.connect()
            shard = shard_of(self.spec, place)
            weights = load_part(setup, shard, chosen.device, fp8=kernels.fp8 and place.size == 1)
            fingerprint = kv_fingerprint(weights, self.spec, length) if with_fingerprint else ""
            decoder = Decoder(shard, weights, kernels, length, leader or ONE_PROCESS)
            if leader is not None:
                leader.loaded()
                if with_fingerprint:
                    parts = " ".join([fingerprint, *leader.fingerprints])
                    fingerprint = hashlib.sha256(parts.encode()).hexdigest()
        except BaseException as error:
            if leader is not None:
                leader.close()
            if isinstance(error, RankFailed):
                raise ConfigError(f"{size_option(place)}: {error}") from error
            raise
        notes = (self._stored_note(weights),)
        return Opened(
            self.shape, decoder, weights.embedding, weights.quantization, fingerprint, notes, leader
        )

    def _stored_note(self, weights: DecoderWeights) -> str:
        """A note on weights that are stored in fewer bits than they are computed with; empty: none."""
        if self.spec.stored is None or weights.quantization:
            return ""
        return f"{self.spec.stored.name}: weights are stored in fewer bits than are used for computing"

    def _setup(
        self, model: ModelOptions, place: Place, chosen: Choices, *, with_fingerprint: bool
    ) -> ModelSetup:
        return ModelSetup(
            place=place,
            local_rank=0,
            host="",
            port=0,
            address="127.0.0.1",
            folder=str(self.folder),
            identity=identity(self.folder) if place.size > 1 else "",
            dtype=dtype_name(chosen.dtype.dtype),
            device=chosen.device.type,
            kernels=chosen.kernels.name,
            cpu_isa=None if model.cpu_isa == "auto" else model.cpu_isa,
            quantization=model.quantization,
            dummy_seed=model.seed if model.load_format == "dummy" else None,
            max_model_len=chosen.max_model_len,
            threads=torch.get_num_threads(),
            with_fingerprint=with_fingerprint,
        )
