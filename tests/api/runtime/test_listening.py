import os
import socket
import stat
from pathlib import Path

import pytest

from headrace.api.runtime.listening import check_address, exposure_warning, unix_socket
from headrace.config import ConfigError, ServerOptions


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


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The path of a socket: relative, since the folders of tests may be too deep for one."""
    monkeypatch.chdir(tmp_path)
    return "headrace.sock"


def test_a_unix_socket_is_there_as_long_as_its_server(path: str) -> None:
    before = os.umask(0o027)
    try:
        with unix_socket(path) as listener:
            assert listener.getsockname() == path
            assert stat.S_IMODE(os.stat(path).st_mode) == 0o750
            assert exposure_warning(ServerOptions(uds=path, host="0.0.0.0"), keys_required=False) == ""
    finally:
        os.umask(before)
    assert not os.path.lexists(path)


def test_a_socket_that_a_killed_server_left_behind_is_replaced(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(path)
    check_address(ServerOptions(uds=path))
    with unix_socket(path) as listener, socket.socket(socket.AF_UNIX) as client:
        listener.listen()
        client.connect(path)
        with pytest.raises(ConfigError, match=r"--uds headrace\.sock: another server listens"):
            check_address(ServerOptions(uds=path))


def test_a_server_that_is_about_to_listen_is_not_replaced(path: str) -> None:
    with unix_socket(path):
        with pytest.raises(ConfigError, match="another server listens on this socket"):
            check_address(ServerOptions(uds=path))
        with pytest.raises(OSError), unix_socket(path):  # noqa: PT011 (the system's words)
            pass
        assert os.path.exists(path)


def test_the_socket_of_a_successor_stays(path: str) -> None:
    with unix_socket(path), socket.socket(socket.AF_UNIX) as successor:
        os.unlink(path)
        successor.bind(path)
    assert os.path.lexists(path)


def test_a_path_that_cannot_be_a_socket_is_refused(path: str) -> None:
    Path("file").write_text("precious")
    for wrong, why in (
        ("file", "a file that is no socket"),
        (".", "a file that is no socket"),
        ("no/folder.sock", "its folder does not exist"),
        ("s" * 108, "at most 107 bytes"),
    ):
        with pytest.raises(ConfigError, match=f"^--uds {wrong}: .*{why}"):
            check_address(ServerOptions(uds=wrong))
    assert Path("file").read_text() == "precious"
