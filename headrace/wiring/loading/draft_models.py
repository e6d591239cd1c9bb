"""Loads the draft model, or the draft head on the model's hidden states, that ``--speculative-config`` names."""

from __future__ import annotations

from headrace.compute.device import freeing_at_once
from headrace.compute.drafting.loading import Beside, LoadedDraft, LoadedHead, load_draft, load_head
from headrace.config import CacheOptions, ConfigError, Options, SchedulerOptions
from headrace.wiring.drafting import speculation


@freeing_at_once()
def load_drafting(options: Options, target: Beside) -> LoadedDraft | LoadedHead | None:
    """The draft model or head that the options name; None if they name neither.

    Raises:
        ConfigError: it cannot be loaded, does not fit ``target``, or does not work with other options.
    """
    config = speculation(options.scheduler)
    if config is None or config.model is None:
        return None
    seed = options.model.seed if options.model.load_format == "dummy" else None
    if not config.has_head:
        return load_draft(config, target, seed)
    _check_tiers(options.cache)
    return load_head(config, target, seed)


def _check_tiers(cache: CacheOptions) -> None:
    if cache.kv_offload_bytes or cache.kv_offload_path is not None:
        raise ConfigError(
            "--speculative-config: method eagle3 keeps keys and values in the blocks of the device; omit"
            " --kv-offload-bytes and --kv-offload-path"
        )


def reads_states(plans: SchedulerOptions) -> bool:
    """Whether a head drafts. It needs the hidden states of a step before the next one is planned: steps cannot overlap.

    Raises:
        ConfigError: the options ask for a head and for overlap.
    """
    config = speculation(plans)
    if config is None or not config.has_head:
        return False
    if plans.overlap:
        raise ConfigError(f"--overlap {plans.overlap}: method eagle3 needs the output of a step first; use 0")
    return True
