"""Options that need states where a model with recurrent states saves none."""

from __future__ import annotations

from headrace.config import ConfigError, Options


def check_states(options: Options, architecture: str) -> None:
    """Raise ConfigError for an option that needs states where none are saved."""
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
