"""TLS files that cannot be used, and those that change while a server uses them."""

import shutil
import ssl
import subprocess
from pathlib import Path

import pytest

from headrace.api.runtime.tls import TlsFiles, check_tls
from headrace.config import ConfigError, ServerOptions

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
