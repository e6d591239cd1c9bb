"""LoRA adapters of `LLM` and `AsyncLLM`, named by vLLM's `LoRARequest`."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.compute.adapters.store import AdapterStore
from headrace.core.adapters import AdapterError
from headrace.core.request import InvalidParameter


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter for prompts: its files are read once, by the first call with an equal value.

    ``lora_int_id`` (at least 1) tells adapters of one folder apart: after the files have changed, a call with another
    number reads them again.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str


AdapterChoice = LoRARequest | Sequence[LoRARequest | None] | None
"""The adapter of all prompts, or one for each; None: the model itself."""


class LoadedAdapters:
    """The adapters that calls have named; for any number of threads."""

    def __init__(self, store: AdapterStore | None) -> None:
        self._store = store
        self._digests: dict[LoRARequest, str] = {}
        self._lock = threading.Lock()

    def digests(self, asked: AdapterChoice, prompts: int) -> list[str]:
        """The adapter of each prompt, empty for the model itself. The first call with an adapter waits for the disk.

        Raises:
            InvalidParameter: an adapter cannot be used, or there are not as many as prompts.
        """
        each = [asked] * prompts if asked is None or isinstance(asked, LoRARequest) else list(asked)
        if len(each) != prompts:
            raise InvalidParameter(
                "lora_request", f"lora_request has {len(each)} adapters for {prompts} prompts"
            )
        return ["" if one is None else self._digest(one) for one in each]

    def _digest(self, asked: LoRARequest) -> str:
        if self._store is None:
            raise InvalidParameter("lora_request", "lora_request needs an engine with enable_lora=True")
        if not isinstance(asked, LoRARequest) or asked.lora_int_id < 1:
            raise InvalidParameter(
                "lora_request", f"lora_request must be a LoRARequest with a number from 1, got {asked!r}"
            )
        with self._lock:
            if asked not in self._digests:
                try:
                    self._digests[asked] = self._store.add(Path(asked.lora_path).expanduser())
                except AdapterError as error:
                    raise InvalidParameter(
                        "lora_request", f"lora_request {asked.lora_name}: {error}"
                    ) from None
            return self._digests[asked]
