import os
import shutil
import socket
import ssl
import stat
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from headrace.api.runtime import listening
from headrace.api.runtime.listening import TlsFiles, check_address, check_tls, exposure_warning, unix_socket
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
        with pytest.raises(ConfigError, match="another server listens on this socket"), unix_socket(path):
            pass
        assert os.path.exists(path)
    assert not os.path.exists(f"{path}.lock")


def test_of_two_servers_that_find_a_socket_left_behind_one_gets_it(path: str, monkeypatch) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(path)
    decided = listening._left_behind

    def slowly(name: str) -> bool:
        """Between its look and its removal of the file another server starts."""
        found = decided(name)
        monkeypatch.setattr(listening, "_left_behind", decided)
        with pytest.raises(ConfigError, match="another server listens on this socket"), unix_socket(name):
            pass
        return found

    monkeypatch.setattr(listening, "_left_behind", slowly)
    with unix_socket(path) as listener, socket.socket(socket.AF_UNIX) as client:
        client.connect(path)
        assert listener.getsockname() == path


def test_a_lock_that_its_server_removes_meanwhile_is_taken_anew(path: str, monkeypatch) -> None:
    names = iter((False, True))
    monkeypatch.setattr(listening, "_is_still", lambda file, name: next(names))
    with unix_socket(path):
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


pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")


def openssl(*words: str) -> None:
    subprocess.run(["openssl", *words], check=True, capture_output=True)


def pair(folder: Path, name: str) -> tuple[str, str]:
    """A certificate for ``name`` and its key."""
    folder.mkdir(exist_ok=True)
    cert, key = str(folder / "cert.pem"), str(folder / "key.pem")
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1")
    openssl("req", "-x509", *curve, "-subj", f"/CN={name}", "-keyout", key, "-out", cert)
    return cert, key


def presented(context: ssl.SSLContext) -> str:
    """The certificate that a server with this context presents."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    ours = context.wrap_bio(incoming, outgoing, server_side=True)
    its = client.wrap_bio(outgoing, incoming)
    for _ in range(4):
        for side in (its, ours):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    return ssl.DER_cert_to_PEM_cert(its.getpeercert(binary_form=True) or b"")


def test_without_tls_there_is_nothing_to_check() -> None:
    check_tls(ServerOptions())


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty.pem").touch()
    for name in ("none.pem", "empty.pem"):
        with pytest.raises(ConfigError, match=name):
            check_tls(ServerOptions(ssl_certfile=str(tmp_path / name)))
    with pytest.raises(ConfigError, match="needs --ssl-certfile"):
        check_tls(ServerOptions(ssl_keyfile=str(tmp_path / "empty.pem")))
    cert, _ = pair(tmp_path / "one", "one")
    _, other = pair(tmp_path / "two", "two")
    with pytest.raises(ConfigError, match=r"cert\.pem and .*key\.pem cannot be used"):
        check_tls(ServerOptions(ssl_certfile=cert, ssl_keyfile=other))


def test_an_encrypted_key_is_named_as_such_and_nothing_asks_for_the_passphrase(tmp_path: Path) -> None:
    cert, key = pair(tmp_path / "one", "one")
    locked = str(tmp_path / "locked.pem")
    openssl("ec", "-in", key, "-aes256", "-passout", "pass:word", "-out", locked)
    with pytest.raises(ConfigError, match=r"private key in .*locked\.pem is encrypted; .*openssl pkey -in"):
        check_tls(ServerOptions(ssl_certfile=cert, ssl_keyfile=locked))
    both = tmp_path / "both.pem"
    both.write_text(Path(cert).read_text() + Path(locked).read_text())
    with pytest.raises(ConfigError, match=r"private key in .*both\.pem is encrypted"):
        check_tls(ServerOptions(ssl_certfile=str(both)))


def test_new_files_are_used_once_both_are_there(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    cert, key = pair(tmp_path / "live", "old")
    new_cert, new_key = pair(tmp_path / "new", "new")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    files = TlsFiles(context, cert, key)
    old = presented(context)
    assert old == Path(cert).read_text()

    shutil.copy(new_cert, cert)  # its key is not there yet
    for _ in range(4):
        files.watch.check()
    assert presented(context) == old
    (warned,) = caplog.records
    assert "the previous ones stay in use" in warned.message

    shutil.copy(new_key, key)
    files.watch.check()
    assert presented(context) == old  # the files may still be being written
    files.watch.check()
    assert presented(context) == Path(new_cert).read_text() != old
    assert "reloaded" in caplog.records[-1].message


def test_a_reload_reads_at_once(tmp_path: Path) -> None:
    cert, key = pair(tmp_path / "live", "old")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    files = TlsFiles(context, cert, key)
    pair(tmp_path / "live", "new")
    assert files.reload()
    assert presented(context) == Path(cert).read_text()
    Path(key).unlink()
    assert not files.reload()
    assert presented(context) == Path(cert).read_text()


def test_handshakes_go_on_while_new_files_are_read(tmp_path: Path) -> None:
    """A certificate and its key are loaded one after the other; no handshake may see the one without the other."""
    pairs = [pair(tmp_path / name, name) for name in ("first", "second")]
    (tmp_path / "live").mkdir()
    cert, key = (shutil.copy(file, tmp_path / "live") for file in pairs[0])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    files = TlsFiles(context, cert, key)
    seen = set[str]()

    def renew() -> None:
        for number in range(100):
            for new, live in zip(pairs[number % 2], (cert, key), strict=True):
                shutil.copy(new, live)
            assert files.reload()

    with ThreadPoolExecutor(1) as pool:
        renewals = pool.submit(renew)
        while not renewals.done():
            seen.add(presented(context))
        renewals.result()
    assert seen == {Path(cert).read_text() for cert, _ in pairs}
