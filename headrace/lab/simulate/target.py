"""A simulated engine as a target of the benchmark: the same driver as for a real one, in virtual time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from headrace.core.engine import Engine
from headrace.lab.bench.engine import EngineTarget
from headrace.lab.simulate.runner import EOS, SimulatedRunner
from headrace.lab.workload import Prompt


class OneAnswer(Mapping[str, tuple[int, ...]]):
    """The same answer for every request. Work ignores its end token, so its length is the one that the work fixes."""

    def __getitem__(self, request_id: str) -> tuple[int, ...]:
        return (EOS,)

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


class VirtualClock:
    """The time of a simulated runner, which also passes while the engine waits."""

    def __init__(self, runner: SimulatedRunner) -> None:
        self._runner = runner
        self._now = 0.0

    def now(self) -> float:
        """Seconds."""
        self._now = max(self._now, self._runner.time)
        return self._now

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
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
    """The token ids of a prompt that has no text."""
    return prompt  # type: ignore[return-value]
