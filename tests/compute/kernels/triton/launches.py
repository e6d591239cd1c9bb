"""Counts what a call launches: operations of torch that compute or copy, and Triton's kernels."""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import InterpretedFunction

_NOTHING = (
    "empty",
    "new_empty",
    "empty_like",
    "detach",
    "lift_fresh",
    "_reshape_alias",
    "_unsafe_view",
    "empty_strided",
)


class Launches(TorchDispatchMode):
    """Names of what was launched; views and new memory are none. Triton's kernels are not run: results mean nothing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.names: list[str] = []

        def counted(kernel: Any, *args: Any, **kwargs: Any) -> None:
            self.names.append(kernel.fn.__name__)

        monkeypatch.setattr(InterpretedFunction, "run", counted)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not func.is_view and name not in _NOTHING:
            self.names.append(name)
        return func(*args, **(kwargs or {}))
