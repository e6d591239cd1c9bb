"""KV transfer with NIXL (extra ``nixl``): over shared memory, TCP, InfiniBand or RoCE, as its UCX backend finds.

The reader reads slots into a staging buffer, which is registered once, and copies them from there. Each connection has
an agent on both sides with a polling progress thread, which uses a part of a core.
"""

from __future__ import annotations

import base64
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from nixl._api import nixl_agent, nixl_agent_config

from headrace.fleet.kv_transfer.shared_memory import CannotAttach

NAME = "NixlConnector"

MEMORY = "DRAM"

Stage = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]

POLL_SECONDS = 0.0001

_abandoned: list[tuple[Any, Stage]] = []
"""Agents and stages of transfers that took too long: the network may still write to them."""


class NixlArea:
    """An area that this process fills."""

    def __init__(self, slots: int, slot_bytes: int) -> None:
        self.slots = slots
        self._pages = np.zeros((slots, slot_bytes), dtype=np.uint8)
        self._agent, self._registered = _agent(self._pages)

    def describe(self) -> Mapping[str, Any]:
        metadata = base64.b64encode(self._agent.get_agent_metadata()).decode()
        return {"agent": metadata, "address": self._pages.ctypes.data, "slots": self.slots}

    def slot(self, number: int) -> memoryview:
        return memoryview(self._pages[number])

    def close(self) -> None:
        self._agent.deregister_memory(self._registered)


class NixlView:
    """An area that another process fills."""

    def __init__(self, described: Mapping[str, Any], slot_bytes: int, timeout: float) -> None:
        self._timeout = timeout
        self._address = int(described["address"])
        self._stage = np.zeros((int(described["slots"]), slot_bytes), dtype=np.uint8)
        self._agent, self._registered = _agent(self._stage)
        self._remote = self._agent.add_remote_agent(base64.b64decode(described["agent"]))

    def read(self, slots: Sequence[int], targets: Sequence[memoryview]) -> None:
        if not slots:
            return
        here, there = (
            self._descriptors(self._stage.ctypes.data, slots),
            self._descriptors(self._address, slots),
        )
        try:
            transfer = self._agent.initialize_xfer("READ", here, there, self._remote)
            state, until = self._agent.transfer(transfer), time.monotonic() + self._timeout
            while state == "PROC" and time.monotonic() < until:
                time.sleep(POLL_SECONDS)
                state = self._agent.check_xfer_state(transfer)
            if state != "PROC":
                self._agent.release_xfer_handle(transfer)
        except Exception as error:  # the classes of its errors are not public
            raise OSError(f"NIXL: {error or type(error).__name__}") from error
        if state != "DONE":
            _abandoned.append((self._agent, self._stage))
            raise OSError(f"NIXL: a transfer ended with {state}")
        for slot, target in zip(slots, targets, strict=True):
            np.copyto(np.frombuffer(target, np.uint8), self._stage[slot])

    def close(self) -> None:
        """Drop the peer; abandoned transfers keep their memory."""
        if any(stage is self._stage for _, stage in _abandoned):
            return
        self._agent.remove_remote_agent(self._remote)
        self._agent.deregister_memory(self._registered)

    def _descriptors(self, address: int, slots: Sequence[int]) -> Any:
        size = self._stage.shape[1]
        return self._agent.get_xfer_descs([(address + slot * size, size, 0) for slot in slots], MEMORY)


class Nixl:
    """`KVTransfer` by NIXL; a read is given up after ``timeout`` seconds."""

    name = NAME

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout

    def register(self, slots: int, slot_bytes: int) -> NixlArea:
        return NixlArea(slots, slot_bytes)

    def attach(self, described: Mapping[str, Any], slot_bytes: int) -> NixlView:
        try:
            return NixlView(described, slot_bytes, self._timeout)
        except Exception as error:
            raise CannotAttach(f"NIXL cannot reach its memory: {error or type(error).__name__}") from error


def _agent(pages: Stage) -> tuple[Any, Any]:
    """A NIXL agent for one connection, and its registration of memory."""
    agent = nixl_agent(secrets.token_hex(16), nixl_agent_config(enable_prog_thread=True, backends=["UCX"]))
    return agent, agent.register_memory([(pages.ctypes.data, pages.nbytes, 0, "")], MEMORY)
