"""Checks of the listening address before a model is loaded: TLS files, free ports, and a warning without API keys."""

from __future__ import annotations

import errno
import ipaddress
import socket
import ssl

from headrace.config import ConfigError, ServerOptions
from headrace.serve.auth.origin import Hosts, allowed_host_problem, allowed_origin_problem


def check_tls(options: ServerOptions) -> None:
    """Raise `ConfigError` if the TLS certificate or its key cannot be used."""
    if options.ssl_certfile is None:
        if options.ssl_keyfile is not None:
            raise ConfigError("--ssl-keyfile needs --ssl-certfile too")
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(options.ssl_certfile, options.ssl_keyfile)
    except OSError as error:
        files = " and ".join(filter(None, (options.ssl_certfile, options.ssl_keyfile)))
        reason = (error.strerror or str(error)).lower()
        raise ConfigError(f"--ssl-certfile, --ssl-keyfile: {files} cannot be used: {reason}") from error


def check_address(options: ServerOptions) -> None:
    """Raise `ConfigError` if the server cannot listen on its address or on the metrics port, or its names are none."""
    _check_origins(options)
    if options.metrics_port and options.metrics_port == options.port:
        raise ConfigError(f"--metrics-port {options.metrics_port} must differ from --port")
    _check_port(options.host, options.port, "--port")
    if options.metrics_port is not None:
        _check_port(options.host, options.metrics_port, "--metrics-port")


def exposure_warning(options: ServerOptions, keys_required: bool) -> str:
    """A warning if other machines can reach the server and no API key is configured; else an empty string."""
    if keys_required or _is_loopback(options.host):
        return ""
    return (
        f"NO API KEYS: the server listens on {options.host}, which other machines can reach. Any of them can "
        "send requests, read the state of all requests, clear the caches and pause the server, and so can web pages in "
        "their browsers, unless --allowed-hosts names the server. Set --api-key or --api-key-file, or listen on "
        "127.0.0.1."
    )


def hosts(options: ServerOptions) -> Hosts:
    """The hosts that requests to the server's ports may name."""
    return Hosts(options.allowed_hosts, options.host if _is_loopback(options.host) else "")


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
