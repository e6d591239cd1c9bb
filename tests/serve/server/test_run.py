from pathlib import Path

import pytest

from headrace.config import ConfigError, ServerOptions
from headrace.serve.server.run import check_tls


def test_without_tls_there_is_nothing_to_check() -> None:
    check_tls(ServerOptions())


def test_tls_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty.pem").touch()
    for name in ("none.pem", "empty.pem"):
        with pytest.raises(ConfigError, match=name):
            check_tls(ServerOptions(ssl_certfile=str(tmp_path / name)))
    with pytest.raises(ConfigError, match="needs --ssl-certfile"):
        check_tls(ServerOptions(ssl_keyfile=str(tmp_path / "empty.pem")))
