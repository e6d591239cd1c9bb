"""An experiment in virtual time: ``headrace simulate --experiment``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace.cli.experiment import describe
from headrace.config import ConfigError, SchedulerOptions

if TYPE_CHECKING:
    from headrace.core.engine import Engine
    from headrace.observe.steering.engine import Steering


class Trial:
    """An experiment that is run in virtual time, on each replica."""

    def __init__(self, body: dict[str, Any]) -> None:
        self._body = body
        self._experiments: list[Any] = []

    def steer(self, plans: SchedulerOptions, engine: Engine) -> Steering:
        """Begin it on an engine.

        Raises:
            ConfigError: a field of it is wrong.
        """
        from headrace.build.operations.request_settings import make_requests
        from headrace.core.request import InvalidParameter
        from headrace.observe.steering.engine import Steering
        from headrace.observe.steering.settings import live_settings

        steering = Steering(
            live_settings(plans.max_num_seqs),
            lambda: engine.knobs,
            lambda: f"replica {len(self._experiments)}",
            requests=make_requests(plans),
        )
        try:
            self._experiments.append(steering.conductor.start(self._body, 0.0))
        except InvalidParameter as error:
            raise ConfigError(f"--experiment: {error}") from None
        return steering

    def reports(self) -> list[dict[str, Any]]:
        """The experiment of each replica, as the server reports it."""
        return [each.report() for each in self._experiments]

    def lines(self, name: str) -> list[str]:
        """What came of it."""
        return [
            f"experiment, {name}",
            *(line for each in self.reports() for line in describe(each)),
        ]
