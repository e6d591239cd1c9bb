"""The ranks of a divided model: starts them, and checks options that they do not support.

Without a launcher, rank 0 starts the others on its machine. Under torchrun, all ranks are started by the same command.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import replace

from headrace.compute.checkpoint import ModelError
from headrace.compute.model.hub import resolve_model
from headrace.compute.model.sharding import PIPELINE, TENSOR, Place
from headrace.config import ConfigError, Launch, ModelOptions, Options, read_launch
from headrace.fleet.launched import Launched, is_loopback, run_rank
from headrace.fleet.others import Others, Processes, RankFailed
from headrace.wiring.drafting import reads_states


def open_others(model: ModelOptions) -> Others:
    """The ranks other than 0. Raises RankFailed."""
    launch = _launch(model)
    return Processes(place_of(model).size) if launch is None else Launched(launch)


def ranks_here(place: Place) -> int:
    """The number of ranks on this machine, which share its CPU."""
    launch = read_launch()
    return place.size if launch is None else launch.local_size


def launched_rank(model: ModelOptions) -> Callable[[], None] | None:
    """The function that runs this process as a rank other than 0, until rank 0 ends; None if it is not such a rank.

    Raises:
        ConfigError: the launcher started another number of ranks. The function raises it if rank 0 cannot be reached or
            refuses the rank, or if the model cannot be found.
    """
    launch = _launch(model)
    if launch is None or launch.rank == 0:
        return None
    _check_size(launch, place_of(model))

    def run() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # ends the process at once, like SIGTERM
        try:
            with_weights = model.load_format != "dummy"
            run_rank(launch, resolve_model(model.model, model.revision, with_weights=with_weights))
        except (RankFailed, ModelError) as error:
            raise ConfigError(f"rank {launch.rank}: {error}") from error

    return run


def check_parallel(options: Options, *, recorded: bool) -> None:
    """Refuse options that several ranks do not support, before anything is loaded.

    Raises:
        ConfigError: an option needs the whole model in one process.
    """
    place, launch = place_of(options.model), _launch(options.model)
    if launch is not None:
        _check_size(launch, place)
        if launch.rank:
            raise ConfigError(f"RANK {launch.rank}: ranks other than 0 run `headrace serve`")
    if place.size == 1:
        return
    if reads_states(options.scheduler):
        raise ConfigError(
            f"--speculative-config: method eagle3 works in one process only, without {size_option(place)}"
        )
    if recorded:
        raise ConfigError(f"a scheduler trace is recorded in one process only, without {size_option(place)}")


def size_option(place: Place) -> str:
    """The option that asks for several ranks."""
    return TENSOR if place.tensor_size > 1 else PIPELINE


def _launch(model: ModelOptions) -> Launch | None:
    """The place of this process among launched ranks, with their secret.

    Raises:
        ConfigError: other machines reach rank 0, and no secret is configured.
    """
    launch = read_launch()
    if launch is None:
        return None
    if not model.rank_secret and not is_loopback(launch.host):
        raise ConfigError(
            f"MASTER_ADDR {launch.host}: ranks that other machines can reach need a secret that all of them know: set "
            "HEADRACE_RANK_SECRET"
        )
    return replace(launch, secret=model.rank_secret or "")


def place_of(model: ModelOptions) -> Place:
    """Rank 0 among the ranks that the options ask for."""
    return Place(0, model.tensor_parallel_size, model.pipeline_parallel_size, model.enable_expert_parallel)


def _check_size(launch: Launch, place: Place) -> None:
    if launch.size != place.size:
        raise ConfigError(
            f"WORLD_SIZE {launch.size}: {TENSOR} {place.tensor_size} times {PIPELINE} {place.pipeline_size} are"
            f" {place.size} ranks"
        )
