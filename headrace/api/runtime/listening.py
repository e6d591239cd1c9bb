"""The listening address and the TLS files: checked before a model is loaded, so that a mistake ends the start at once.

Also the Unix socket of ``--uds``, a warning without API keys, and new TLS files without a restart.
"""

from __future__ import annotations

import errno
import fcntl
import ipaddress
import logging
import os
import socket
import ssl
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

from headrace.api.auth.access import Hosts, allowed_host_problem, allowed_origin_problem
from headrace.config import ConfigError, ServerOptions
from headrace.files import private_opener
from headrace.service.file_watch import FileWatch

logger = logging.getLogger(__name__)

MAX_SOCKET_PATH_BYTES = 107
"""What an address of a Unix socket holds, without the byte that ends it."""

PROBE_SECONDS = 1.0
"""How long the server that may own a socket has to accept a connection."""


def check_address(options: ServerOptions) -> None:
    """Raise `ConfigError` if the server cannot listen on its address or on the metrics port, or its names are none."""
    _check_origins(options)
    if options.uds is not None:
        _check_socket_file(options.uds)
    else:
        if options.metrics_port and options.metrics_port == options.port:
            raise ConfigError(f"--metrics-port {options.metrics_port} must differ from --port")
        _check_port(options.host, options.port, "--port")
    if options.metrics_port is not None:
        _check_port(options.host, options.metrics_port, "--metrics-port")


def exposure_warning(options: ServerOptions, keys_required: bool) -> str:
    """A warning if other machines can reach the server and no API key is configured; else an empty string."""
    if keys_required or options.uds is not None or _is_loopback(options.host):
        return ""
    return (
        f"NO API KEYS: the server listens on {options.host}, which other machines can reach. Any of them can "
        "send requests, read the state of all requests, clear the caches and pause the server, and so can web pages in "
        "their browsers, unless --allowed-hosts names the server. Set --api-key or --api-key-file, or listen on "
        "127.0.0.1."
    )


@contextmanager
def unix_socket(path: str) -> Iterator[socket.socket]:
    """A socket bound to the file ``path``, which is removed after the block.

    Raises:
        ConfigError: the file cannot be created, or is there although no server has left it behind.
    """
    with ExitStack() as held:
        try:
            held.enter_context(_owned(path))
            if _left_behind(path):
                os.unlink(path)
            listener = held.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            listener.bind(path)
            listener.listen()  # so that a second server does not take it for left behind
            bound = os.stat(path).st_ino
        except OSError as error:
            raise ConfigError(f"--uds {path}: {(error.strerror or str(error)).lower()}") from error
        try:
            yield listener
        finally:
            with suppress(OSError):
                if os.stat(path).st_ino == bound:  # not that of a server which has replaced this one
                    os.unlink(path)


@contextmanager
def _owned(path: str) -> Iterator[None]:
    """Lock the name of a socket: two servers that find it left behind at once would each remove the other's.

    Raises:
        OSError: another server has it.
    """
    name = f"{path}.lock"
    while True:
        with open(name, "w", opener=private_opener) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise OSError(errno.EADDRINUSE, "another server listens on this socket", path) from None
            if not _is_still(file.fileno(), name):  # its server has just removed it
                continue
            try:
                yield
            finally:
                os.unlink(name)
            return


def _is_still(file: int, name: str) -> bool:
    """Whether ``name`` is the name of an open file."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file), os.stat(name))
    return False


def _check_socket_file(path: str) -> None:
    """Raise `ConfigError` if no socket can be bound to ``path``."""
    longest = MAX_SOCKET_PATH_BYTES
    if len(os.fsencode(path)) > longest:
        raise ConfigError(f"--uds {path}: the path of a Unix socket has at most {longest} bytes")
    try:
        if os.path.lexists(path):
            if not _left_behind(path):
                raise ConfigError(f"--uds {path}: another server listens on this socket")
        elif not os.access(os.path.dirname(path) or ".", os.W_OK | os.X_OK):
            raise ConfigError(f"--uds {path}: its folder does not exist or cannot be written to")
    except OSError as error:
        raise ConfigError(f"--uds {path}: {(error.strerror or str(error)).lower()}") from error


def _left_behind(path: str) -> bool:
    """Whether ``path`` is a socket that no process listens on any more.

    Raises:
        FileExistsError: there is a file of another kind.
    """
    if not os.path.lexists(path):
        return False
    if not stat.S_ISSOCK(os.lstat(path).st_mode):
        raise FileExistsError(errno.EEXIST, "there is a file that is no socket", path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(PROBE_SECONDS)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return True
        except TimeoutError:  # a server that is too busy to accept
            return False
    return False


def hosts(options: ServerOptions, *, metrics: bool = False) -> Hosts:
    """The hosts that requests to the server, or to its ``metrics`` port, may name.

    No web page reaches a Unix socket, and the proxy before it has names of its own.
    """
    on_loopback = (metrics or options.uds is None) and _is_loopback(options.host)
    return Hosts(options.allowed_hosts, options.host if on_loopback else "")


def _check_origins(options: ServerOptions) -> None:
    for option, values, problem in (
        ("--allowed-hosts", options.allowed_hosts, allowed_host_problem),
        ("--allowed-origins", options.allowed_origins, allowed_origin_problem),
    ):
        for each in values:
            if why := problem(each):
                raise ConfigError(f"{option} {each}: {why}")


def _check_port(host: str, port: int, option: str) -> None:
    for family, kind, protocol, _, address in _resolve(host, port):
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(address)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    why = f"port {port} is in use on {host}; choose another with {option}"
                elif error.errno == errno.EACCES:
                    why = f"port {port} needs root privileges; choose one above 1023 with {option}"
                elif error.errno == errno.EADDRNOTAVAIL:
                    why = f"--host {host}: this machine has no such address"
                else:
                    why = f"cannot listen on {host}:{port}: {(error.strerror or str(error)).lower()}"
                raise ConfigError(why) from error


def _resolve(host: str, port: int) -> list[tuple[int, int, int, str, tuple[object, ...]]]:
    try:
        return list(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE))
    except OSError as error:
        raise ConfigError(f"--host {host}: {(error.strerror or str(error)).lower()}") from error


def _is_loopback(host: str) -> bool:
    addresses = [str(address[0]).partition("%")[0] for *_, address in _resolve(host, 0)]
    return all(ipaddress.ip_address(address).is_loopback for address in addresses)


class EncryptedKey(Exception):
    """The private key is encrypted with a passphrase, for which OpenSSL would ask the terminal."""


def check_tls(options: ServerOptions) -> None:
    """Raise `ConfigError` if the TLS certificate or its key cannot be used."""
    if options.ssl_certfile is None:
        if options.ssl_keyfile is not None:
            raise ConfigError("--ssl-keyfile needs --ssl-certfile too")
        return
    _context(options.ssl_certfile, options.ssl_keyfile)


class TlsFiles:
    """Keeps what ``context`` presents up to date with the files; new connections then use the new certificate.

    Files that cannot be used, such as a certificate whose key has not been written yet, leave the previous ones in use
    and are reported once. The files are read into a context of their own, to which each handshake switches: a
    certificate and its key can only be loaded one after the other, and a handshake between the two would fail.
    """

    def __init__(
        self,
        context: ssl.SSLContext,
        certfile: str,
        keyfile: str | None,
    ) -> None:
        self._presented = context
        self._files = certfile, keyfile
        context.sni_callback = self._present
        self.watch = FileWatch([file for file in self._files if file is not None], self.reload)

    def reload(self) -> bool:
        """Read the files now; return whether they can be used."""
        self.watch.reading()
        try:
            self._presented = _context(*self._files)
        except ConfigError as error:
            logger.warning("TLS files not reloaded, the previous ones stay in use: %s", error)
            return False
        logger.info("TLS certificate and key reloaded: %s", _named(*self._files))
        return True

    def _present(
        self, connection: ssl.SSLSocket | ssl.SSLObject, name: str | None, _: ssl.SSLContext
    ) -> None:
        """Called in each handshake, with or without a server ``name``, before the certificate is sent."""
        connection.context = self._presented


def _context(certfile: str, keyfile: str | None) -> ssl.SSLContext:
    """A context that presents the certificate.

    Raises:
        ConfigError: the files cannot be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certfile, keyfile, password=_no_passphrase)
    except EncryptedKey:
        raise ConfigError(
            f"--ssl-keyfile: the private key in {keyfile or certfile} is encrypted; write it without a passphrase: "
            f"openssl pkey -in {keyfile or certfile} -out NEW_FILE"
        ) from None
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ConfigError(
            f"--ssl-certfile, --ssl-keyfile: {_named(certfile, keyfile)} cannot be used: {reason}"
        ) from error
    return context


def _named(certfile: str, keyfile: str | None) -> str:
    return " and ".join(filter(None, (certfile, keyfile)))


def _no_passphrase() -> str:
    raise EncryptedKey
