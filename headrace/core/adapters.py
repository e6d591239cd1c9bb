"""What the core needs of LoRA adapters: that one is on the device before its request starts."""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Protocol

from headrace.core.events import SkipReason

ADAPTER_PREFIX = "the LoRA adapter cannot be used: "
"""The beginning of the message of a request that failed because of `AdapterLost`."""


class AdapterError(ValueError):
    """An adapter's files or name cannot be used; the message names the file, setting or tensor, and the limit."""


class AdapterNameError(AdapterError):
    """The name of an adapter is in use, or none can be so."""


class AdapterMissing(AdapterError):
    """There is no adapter: a file is not there."""


class AdapterLost(Exception):
    """An adapter cannot come to the device any more; the message says why."""


class Adapters(Protocol):
    """Brings adapters to the device, which has room for some; each is named by the digest of its files."""

    def hold(self, adapter: str, used: Callable[[], Set[str]]) -> SkipReason | None:
        """Why a request with this adapter may not start yet; None: it is there, and stays while it is ``used``.

        It starts bringing the adapter, and returns at once.

        Raises:
            AdapterLost: it will never be there.
        """
        ...
