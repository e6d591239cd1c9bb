import socket
from pathlib import Path

import pytest

from headrace.config import ConfigError, ServerOptions
from headrace.serve.http.runtime.listening import check_address, check_tls, exposure_warning


def test_without_tls_there_is_nothing_to_check() -> None:
    check_tls(ServerOptions())


def test_tls_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty.pem").touch()
    for name in ("none.pem", "empty.pem"):
        with pytest.raises(ConfigError, match=name):
            check_tls(ServerOptions(ssl_certfile=str(tmp_path / name)))
    with pytest.raises(ConfigError, match="needs --ssl-certfile"):
        check_tls(ServerOptions(ssl_keyfile=str(tmp_path / "empty.pem")))


def test_an_address_is_looked_at_before_it_is_needed() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(
            ConfigError, match=rf"port {port} is in use on 127.0.0.1; choose another with --port"
        ):
            check_address(ServerOptions(port=port))
    check_address(ServerOptions(port=port))
    check_address(ServerOptions(port=0))
    with pytest.raises(ConfigError, match=r"this machine has no such address|cannot listen on"):
        check_address(ServerOptions(host="192.0.2.1"))
    with pytest.raises(ConfigError, match=r"--host no\.such\.invalid"):
        check_address(ServerOptions(host="no.such.invalid"))


def test_the_metrics_port_is_checked_too() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port {port} is in use .* with --metrics-port"):
            check_address(ServerOptions(port=0, metrics_port=port))
    with pytest.raises(ConfigError, match="must differ from --port"):
        check_address(ServerOptions(port=9000, metrics_port=9000))
    check_address(ServerOptions(port=0, metrics_port=0))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_a_loopback_address_needs_no_key(host: str) -> None:
    assert exposure_warning(ServerOptions(host=host), keys_required=False) == ""


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_an_address_that_others_can_reach_is_warned_about_unless_there_are_keys(host: str) -> None:
    warning = exposure_warning(ServerOptions(host=host), keys_required=False)
    assert "NO API KEYS" in warning
    assert "--api-key-file" in warning
    assert exposure_warning(ServerOptions(host=host), keys_required=True) == ""
