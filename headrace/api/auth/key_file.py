"""Reads the API key file again when it changes, so that keys can be rotated without a restart.

If the file cannot be used, the previous keys stay valid and the error is logged once. Running streams always continue.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from headrace.api.auth.api_keys import Grant, Keys
from headrace.api.auth.roles import Role
from headrace.service.file_watch import POLL_SECONDS, FileWatch

logger = logging.getLogger(__name__)


class KeyFile:
    """Owns the server's `keys`; ``read`` returns all keys, those of ``file`` and of options.

    Its ``watch`` reads a changed file again; `reload` reads it at once.

    Raises:
        ValueError: the keys cannot be used, see `read_keys`.
    """

    def __init__(
        self,
        read: Callable[[], Mapping[str, Grant]],
        file: str | None,
        poll_seconds: float = POLL_SECONDS,
    ) -> None:
        self._read = read
        self.watch = FileWatch([] if file is None else [file], self.reload, poll_seconds)
        self.keys = Keys(read())

    def reload(self) -> bool:
        """Read the keys now; return whether they are valid. If not, the error is logged and the old keys stay valid."""
        self.watch.reading()
        try:
            keys = self._read()
        except ValueError as error:
            logger.warning("API keys not reloaded, the previous keys stay valid: %s", error)
            return False
        self.keys.replace(keys)
        counts = self.keys.count()
        logger.info("API keys reloaded: %s", ", ".join(f"{counts[role]} {role}" for role in Role))
        return True
