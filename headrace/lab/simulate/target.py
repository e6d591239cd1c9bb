"""A simulated engine as a target of the benchmark: the same driver as for a real one, in virtual time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from headrace.core.engine import Engine
from headrace.lab.bench.engine import EngineTarget
from headrace.lab.simulate.runner import EOS, SimulatedRunner
from headrace.lab.workload.work import Prompt


class OneAnswer(Mapping[str, tuple[int, ...]]):
    """The same output for every request. Work ignores the end token, so outputs have the length that it prescribes."""

    def __getitem__(self, request_id: str) -> tuple[int, ...]:
        return (EOS,)

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


class VirtualClock:
    """The clock of a simulated runner; `sleep` advances it while the engine is idle."""

    def __init__(self, runner: SimulatedRunner) -> None:
        self._runner = runner
        self._now = 0.0

    def now(self) -> float:
        """The virtual time in seconds."""
        self._now = max(self._now, self._runner.time)
        return self._now

    def sleep(self, seconds: float) -> None:
        """Advances the clock."""
        self._now = self.now() + seconds


def simulated_target(
    name: str, engine: Engine, runner: SimulatedRunner, concurrency: int | None = None
) -> EngineTarget:
    """A target around an engine over ``runner``; prompts are token ids. See `EngineTarget` for ``concurrency``."""
    clock = VirtualClock(runner)
    return EngineTarget(
        name,
        engine,
        token_ids,
        before=engine.reset_prefix_cache,
        clock=clock.now,
        sleep=clock.sleep,
        concurrency=concurrency,
    )


def token_ids(prompt: Prompt) -> tuple[int, ...]:
    """Returns a prompt of token ids unchanged."""
    return prompt  # type: ignore[return-value]
