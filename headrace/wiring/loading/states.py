"""Options on recurrent states that a model cannot follow, because it has none or saves none there."""

from __future__ import annotations

from headrace.compute.model.shape import ModelShape
from headrace.config import CacheOptions, ConfigError, Options


def check_states(options: Options, shape: ModelShape) -> None:
    """Raise ConfigError for an option that has no effect on this model, or that needs states where none are saved."""
    if not shape.state_bytes or not options.cache.enable_prefix_caching:
        _check_checkpoints(options.cache, shape)
    if shape.state_bytes:
        _check_tiers(options, shape.architecture)


def _check_checkpoints(cache: CacheOptions, shape: ModelShape) -> None:
    """Refuse options on checkpoints where there are none."""
    why = (
        "prefix caching is disabled" if shape.state_bytes else f"{shape.architecture} has no recurrent states"
    )
    given = {
        "state-cache-bytes": bool(cache.state_cache_bytes),
        "state-cache-interval": cache.state_cache_interval != CacheOptions().state_cache_interval,
    }
    for name, changed in given.items():
        if changed:
            raise ConfigError(f"--{name}: {why}, so there are no checkpoints of states; omit this option")


def _check_tiers(options: Options, architecture: str) -> None:
    cache = options.cache
    given = {
        "speculative-config": options.scheduler.speculative_config,
        "kv-offload-bytes": cache.kv_offload_bytes,
        "kv-offload-path": cache.kv_offload_path,
        "kv-transfer-config": cache.kv_transfer_config,
    }
    for name, value in given.items():
        if value:
            raise ConfigError(
                f"--{name}: {architecture} keeps recurrent states, which are saved only at checkpoints in the memory of"
                " the device; omit this option"
            )
