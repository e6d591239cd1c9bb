"""Options on recurrent states that a model cannot follow, because it has none or saves none there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.config import CacheOptions, ConfigError, Options
from headrace.wiring.drafting import speculation

if TYPE_CHECKING:
    from headrace.compute.model.shape import ModelShape


def check_states(options: Options, shape: ModelShape) -> None:
    """Raise ConfigError for an option that has no effect on this model, or that needs states where none are saved."""
    check_checkpoints(options.cache, shape.architecture, stateful=bool(shape.state_bytes))
    if shape.state_bytes:
        _check_others(options, shape.architecture)


def check_checkpoints(cache: CacheOptions, name: str, *, stateful: bool) -> None:
    """Raise ConfigError for options on checkpoints where there are none: the model of this ``name`` is not
    ``stateful``, or prefixes are not cached.
    """
    if stateful and cache.enable_prefix_caching:
        return
    why = "prefix caching is disabled" if stateful else f"{name} has no recurrent states"
    given = {
        "state-cache-bytes": bool(cache.state_cache_bytes),
        "state-cache-interval": cache.state_cache_interval != CacheOptions().state_cache_interval,
    }
    for name, changed in given.items():
        if changed:
            raise ConfigError(f"--{name}: {why}, so there are no checkpoints of states; omit this option")


def _check_others(options: Options, architecture: str) -> None:
    """Refuse what would need states that are not there."""
    if options.cache.kv_transfer_config:
        raise ConfigError(
            f"--kv-transfer-config: {architecture} keeps recurrent states, which are not sent to other servers; omit"
            " this option"
        )
    drafting = speculation(options.scheduler)
    if drafting is not None and drafting.has_head:
        raise ConfigError(
            f"--speculative-config: method eagle3 does not follow the recurrent states of {architecture}; use another"
            " method"
        )
