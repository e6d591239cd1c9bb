"""KV cache fields of a call: how long its prompt is retained, and which other server has or needs its blocks.

``kv_transfer_params`` are vLLM's: a proxy sends a request with ``do_remote_decode`` to a prefill server, and passes the
``kv_transfer_params`` of the response unchanged to a decode server.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from headrace.api.errors import invalid
from headrace.api.wire import Wire
from headrace.core.request import Retention

MARKED_RETENTION = 60
"""Retention priority of prompts that clients ask to retain; others have 35."""

KEPT_FOR_A_DAY = Retention(0, None, MARKED_RETENTION, 86_400.0)

KEPT_FOR_DECODING = Retention(0, None, MARKED_RETENTION, 60.0)
"""Retention of a prompt that another server is going to pull."""

FIELD = "kv_transfer_params"


class KVTransferParams(Wire):
    """Whether the prompt is computed here for another server, or was computed there for this one."""

    do_remote_decode: bool = Field(
        False, description="Another server pulls the prompt's KV blocks and decodes."
    )
    do_remote_prefill: bool = Field(False, description="Pull the prompt's KV blocks from remote_host.")
    remote_prefill_runs: bool = Field(
        False, description="With do_remote_prefill: pull the blocks while remote_host computes the prompt."
    )
    remote_engine_id: str | None = Field(
        None, max_length=256, description="Informative: blocks have global names."
    )
    remote_block_ids: list[int] | None = Field(
        None, max_length=0, description="Always empty: blocks are found by the content of the prompt."
    )
    remote_host: str | None = Field(None, max_length=256, description="One of this server's peers.")
    remote_port: int | None = Field(None, ge=1, le=65_535)
    tp_size: int | None = Field(None, ge=1, le=1, description="Ranks of the other server.")


@dataclass(frozen=True, slots=True)
class KVSharing:
    """This server's part in KV transfer: where it publishes blocks, and the addresses that it pulls from."""

    engine_id: str = ""
    host: str = ""
    port: int = 0
    peers: Sequence[str] = ()

    def peer(self, asked: KVTransferParams | None) -> str:
        """The one peer that has a call's prompt; empty if any may have it.

        Raises:
            ApiError: ``remote_host`` is no peer, fields contradict each other, or this server publishes no blocks.
        """
        if asked is None:
            return ""
        if asked.do_remote_decode and asked.do_remote_prefill:
            raise invalid(f"{FIELD}: do_remote_decode and do_remote_prefill exclude each other", FIELD)
        if asked.do_remote_decode and not self.port:
            raise invalid(
                f"{FIELD}.do_remote_decode: this server publishes no KV blocks (--kv-transfer-config)", FIELD
            )
        if not asked.do_remote_prefill:
            if asked.remote_prefill_runs:
                raise invalid(f"{FIELD}.remote_prefill_runs needs do_remote_prefill", FIELD)
            return ""
        if asked.remote_host is None or asked.remote_port is None:
            raise invalid(f"{FIELD}.do_remote_prefill needs remote_host and remote_port", FIELD)
        name = f"{asked.remote_host}:{asked.remote_port}"
        if name not in self.peers:
            raise invalid(
                f"{FIELD}.remote_host: this server has no peer {name} (--kv-transfer-config)", FIELD
            )
        return name

    def answer(self, asked: KVTransferParams | None) -> dict[str, Any]:
        """The response's field ``kv_transfer_params`` for the server that will decode; empty if there is none."""
        if asked is None or not asked.do_remote_decode:
            return {}
        return {
            FIELD: {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "remote_engine_id": self.engine_id,
                "remote_block_ids": [],
                "remote_host": self.host,
                "remote_port": self.port,
                "tp_size": 1,
            }
        }


NO_SHARING = KVSharing()


def retained(asked: KVTransferParams | None, prompt_cache_retention: str | None) -> tuple[Retention, ...]:
    """How long the whole prompt of a call is retained."""
    day = (KEPT_FOR_A_DAY,) if prompt_cache_retention == "24h" else ()
    return (*day, KEPT_FOR_DECODING) if asked is not None and asked.do_remote_decode else day
