"""An experiment in virtual time: ``headrace simulate --experiment``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace.cli.experiment import describe
from headrace.config import ConfigError, SchedulerOptions

if TYPE_CHECKING:
    from headrace.core.engine import Engine
    from headrace.tuning.engine_tuning import EngineTuning


class Trial:
    """An experiment that is run in virtual time, on each replica."""

    def __init__(self, body: dict[str, Any]) -> None:
        from headrace.wiring.dry_run import Trial

        self._trial = Trial(body)

    def steer(self, plans: SchedulerOptions, engine: Engine) -> EngineTuning:
        """Starts the experiment on an engine.

        Raises:
            ConfigError: a field of the experiment is invalid.
        """
        from headrace.core.request import InvalidParameter

        try:
            return self._trial.steer(plans, engine)
        except InvalidParameter as error:
            raise ConfigError(f"--experiment: {error}") from None

    def reports(self) -> list[dict[str, Any]]:
        """The experiment of each replica, as the server reports it."""
        return [each.report() for each in self._trial.experiments]

    def lines(self, name: str) -> list[str]:
        """The results as lines."""
        return [
            f"experiment, {name}",
            *(line for each in self.reports() for line in describe(each)),
        ]
