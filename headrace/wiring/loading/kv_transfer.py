"""Sets up KV transfer with other servers: ``--kv-transfer-config``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.api.compile.policies import KVSharing
from headrace.compute.model.kv import PagedKV
from headrace.config import CacheOptions, ConfigError, Options
from headrace.config.objects import KVTransferConfig, read_kv_transfer
from headrace.core.memory.block_pool import BlockPool
from headrace.fleet.kv_transfer.exporter import Exporter, Published
from headrace.fleet.kv_transfer.link import Importer, Link
from headrace.fleet.kv_transfer.shared_memory import KVTransfer, SharedMemory

OPTION = "--kv-transfer-config"

MOST_SLOTS = 512
"""Maximum blocks of one message."""


def _transfer(config: KVTransferConfig) -> KVTransfer:
    """The connector that the configuration names.

    Raises:
        ConfigError: its package is not installed.
    """
    if config.kv_connector == SharedMemory.name:
        return SharedMemory()
    try:
        from headrace.fleet.kv_transfer.nixl import Nixl
    except ImportError as error:
        raise ConfigError(
            f"{OPTION}: {config.kv_connector} needs nixl ({error}); install it with: pip install 'headrace[nixl]'"
        ) from error
    return Nixl(config.timeout_seconds)


@dataclass(slots=True)
class OpenTransfer:
    """KV transfer of a loaded model. The exporter runs once the model's prefix cache exists."""

    config: KVTransferConfig
    transfer: KVTransfer
    identity: Mapping[str, Any]
    secret: bytes
    kv: PagedKV
    importer: Importer | None
    exporter: Exporter | None = None

    @property
    def block_bytes(self) -> int:
        return int(self.identity["block_bytes"])

    def publish(self, pool: BlockPool) -> None:
        """Let peers read the prefix cache, if this server is a producer.

        Raises:
            ConfigError: the address cannot be used.
        """
        config = self.config
        if not config.produces:
            return
        published = Published(self.kv.copy_out)
        slots = max(1, min(config.kv_buffer_size // self.block_bytes, MOST_SLOTS))
        try:
            self.exporter = Exporter(
                self.transfer,
                published,
                self.identity,
                self.secret,
                host=config.kv_ip,
                port=config.kv_port,
                slots=slots,
                slot_bytes=self.block_bytes,
            )
        except OSError as error:
            address = f"{config.kv_ip}:{config.kv_port}"
            raise ConfigError(f"{OPTION}: cannot listen at {address}: {error.strerror or error}") from error
        pool.notifier.listeners.append(published)

    def sharing(self) -> KVSharing:
        """The KV transfers that requests may ask for."""
        peers = self.importer.peers if self.importer else ()
        if self.exporter is None:
            return KVSharing(peers=peers)
        host, port = self.config.kv_ip, self.exporter.port
        return KVSharing(self.config.engine_id or f"{host}:{port}", host, port, peers)

    def describe(self) -> str:
        """A line for the terminal."""
        parts = []
        if self.exporter is not None:
            parts.append(f"publishes blocks at {self.config.kv_ip}:{self.exporter.port}")
        if self.importer is not None:
            parts.append(f"pulls blocks from {', '.join(self.importer.peers)}")
        return f"{self.config.kv_connector} {' and '.join(parts)}"

    def close(self) -> None:
        """End all connections."""
        if self.exporter is not None:
            self.exporter.close()
        if self.importer is not None:
            self.importer.close()


def check_transfer(options: Options, *, recorded: bool) -> None:
    """Refuse options that cannot be combined with KV transfer, before anything is loaded.

    Raises:
        ConfigError: an option contradicts it.
    """
    cache, model = options.cache, options.model
    if cache.kv_transfer_config is None:
        return
    config = read_kv_transfer(OPTION, cache.kv_transfer_config)
    if not cache.kv_transfer_secret:
        raise ConfigError(
            f"{OPTION} needs a secret that all its servers know: set HEADRACE_KV_TRANSFER_SECRET"
        )
    if not cache.enable_prefix_caching:
        raise ConfigError(f"{OPTION} exchanges the prefix cache, but --no-enable-prefix-caching is given")
    if config.peers and not cache.kv_offload_bytes:
        raise ConfigError(
            f"{OPTION}: blocks of peers arrive in host memory; set its size with --kv-offload-bytes, for example 1GiB"
        )
    if model.tensor_parallel_size * model.pipeline_parallel_size > 1:
        raise ConfigError(f"{OPTION} works for a model in one process only")
    if recorded:
        raise ConfigError(
            f"a scheduler trace cannot be recorded with {OPTION}: a trace has no blocks of peers"
        )


def open_transfer(cache: CacheOptions, identity: Mapping[str, Any], kv: PagedKV) -> OpenTransfer | None:
    """KV transfer as configured, with its connections to peers; None without the option.

    ``identity`` has the properties that must be equal on both servers for their blocks to be compatible.
    """
    if cache.kv_transfer_config is None or cache.kv_transfer_secret is None:
        return None
    config = read_kv_transfer(OPTION, cache.kv_transfer_config)
    transfer = _transfer(config)
    secret = cache.kv_transfer_secret.encode()
    identity = {**identity, "connector": transfer.name}
    links = [
        Link(
            peer.host,
            peer.port,
            transfer,
            identity,
            secret,
            block_bytes=identity["block_bytes"],
            timeout=config.timeout_seconds,
        )
        for peer in config.peers
    ]
    importer = Importer(links, config.timeout_seconds) if links else None
    return OpenTransfer(config, transfer, identity, secret, kv, importer)
