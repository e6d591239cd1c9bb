import socket
from pathlib import Path

import pytest

from headrace.config import ConfigError, ServerOptions
from headrace.serve.http.run import check_address, check_tls


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
        with pytest.raises(ConfigError, match=rf"port {port} is in use on 127.0.0.1; choose another with --port"):
            check_address(ServerOptions(port=port))
    check_address(ServerOptions(port=port))
    check_address(ServerOptions(port=0))
    with pytest.raises(ConfigError, match=r"this machine has no such address|cannot listen on"):
        check_address(ServerOptions(host="192.0.2.1"))
    with pytest.raises(ConfigError, match=r"--host no\.such\.invalid"):
        check_address(ServerOptions(host="no.such.invalid"))
