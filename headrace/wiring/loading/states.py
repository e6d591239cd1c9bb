"""Options of models with recurrent states, which cannot compute a position twice or begin within a sequence."""

from __future__ import annotations

from dataclasses import replace

from headrace.config import ConfigError, Options


def with_states(options: Options, architecture: str) -> Options:
    """The options without prefix caching.

    Raises:
        ConfigError: an option needs states of earlier positions.
    """
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
                f"--{name}: {architecture} keeps recurrent states, which are not saved for earlier positions; omit this"
                " option"
            )
    return replace(options, cache=replace(cache, enable_prefix_caching=False))
