"""LoRA adapters of a loaded model: checks that it can have some, and opens their store."""

from __future__ import annotations

from pathlib import Path

import torch

from headrace.compute.adapters.layout import AdapterLayout, adapter_layout
from headrace.compute.adapters.store import AdapterStore
from headrace.compute.model.decoder import Decoder
from headrace.compute.model.gguf.file import is_gguf
from headrace.config import ConfigError, Options, check_adapters
from headrace.wiring.loading.computing import Computing
from headrace.wiring.loading.ranks import place_of, size_option


def check_lora(options: Options, *, recorded: bool) -> None:
    """Refuse options that do not go with adapters, before anything is loaded.

    Raises:
        ConfigError: an option needs another one, or excludes adapters.
    """
    check_adapters(options.adapters, options.server.lora_modules)
    if not options.adapters.enable_lora:
        return
    place = place_of(options.model)
    if place.size > 1:
        raise ConfigError(f"--enable-lora works in one process only, without {size_option(place)}")
    if options.observability.kv_events_config is not None:
        raise ConfigError(
            "--kv-events-config: its events do not name LoRA adapters; omit it, or --enable-lora"
        )
    if recorded:
        raise ConfigError("--enable-lora: a scheduler trace of requests with adapters is not supported")


def check_base(options: Options, path: Path) -> None:
    """Raise ConfigError if the base model is a GGUF file, which may store the outputs of heads in another order."""
    if options.adapters.enable_lora and is_gguf(path):
        raise ConfigError(
            f"--enable-lora: {path.name} is a GGUF file; adapters fit the model's safetensors, so serve those"
        )


def open_adapters(options: Options, computing: Computing) -> AdapterStore | None:
    """The store of the model's adapters; None without ``--enable-lora``.

    Raises:
        ConfigError: the model cannot have adapters.
    """
    given, decoder = options.adapters, computing.decoder
    if not given.enable_lora:
        return None
    return AdapterStore(
        layout_of(computing),
        _decoder(computing).prepare_adapter,
        decoder.dtype,
        max_rank=given.max_lora_rank,
        places=given.max_loras,
        host=given.host_adapters,
    )


def adapter_bytes(options: Options, computing: Computing) -> int:
    """The memory of the device for adapters, all of the highest rank; on a CPU with that for those in host memory."""
    given = options.adapters
    if not given.enable_lora:
        return 0
    count = given.max_loras + (given.host_adapters if computing.device.type == "cpu" else 0)
    return count * layout_of(computing).nbytes(given.max_lora_rank, computing.choice.dtype.itemsize)


def layout_of(computing: Computing) -> AdapterLayout:
    """The modules that adapters may change.

    Raises:
        ConfigError: the model cannot have adapters.
    """
    decoder = _decoder(computing)
    if computing.choice.dtype == torch.float16 and computing.kernels.name == "cpp":
        raise ConfigError(
            "--enable-lora: kernels 'cpp' add adapters in bfloat16 or float32; use --dtype bfloat16"
        )
    return adapter_layout(decoder.spec)


def _decoder(computing: Computing) -> Decoder:
    if not isinstance(computing.decoder, Decoder):
        raise ConfigError(
            f"--enable-lora: {computing.shape.architecture} is computed by transformers' code, which takes no adapters"
            " here; merge the adapter into its base model (peft: merge_and_unload) and serve the merged folder"
        )
    if computing.decoder.spec.mixer is not None:  # its attention has gates among the outputs of queries, too
        raise ConfigError(
            f"--enable-lora: {computing.shape.architecture} keeps recurrent states, and takes no adapters"
        )
    if not computing.decoder.spec.alike:
        raise ConfigError(
            f"--enable-lora: the layers of {computing.shape.architecture} have different heads or inputs of their own,"
            " and take no adapters"
        )
    return computing.decoder
