"""What the commands that write files share: saying in one line that one cannot be written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace.config import ConfigError


@contextmanager
def writing(flag: str, path: Path) -> Iterator[None]:
    """Around what writes to ``path``, which ``flag`` names.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror}") from None
