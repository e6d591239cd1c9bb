"""The TLS certificate and key of the server: checked before the start, read again without a restart."""

from __future__ import annotations

import logging
import ssl

from headrace.config import ConfigError, ServerOptions
from headrace.service.file_watch import POLL_SECONDS, FileWatch

logger = logging.getLogger(__name__)


class EncryptedKey(Exception):
    """The private key is encrypted with a passphrase, for which OpenSSL would ask the terminal."""


def check_tls(options: ServerOptions) -> None:
    """Raise `ConfigError` if the TLS certificate or its key cannot be used."""
    if options.ssl_certfile is None:
        if options.ssl_keyfile is not None:
            raise ConfigError("--ssl-keyfile needs --ssl-certfile too")
        return
    _load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), options.ssl_certfile, options.ssl_keyfile)


class TlsFiles:
    """Keeps ``context`` up to date with the files; new connections then use the new certificate.

    Files that cannot be used, such as a certificate whose key has not been written yet, leave the previous ones in use
    and are reported once.
    """

    def __init__(
        self,
        context: ssl.SSLContext,
        certfile: str,
        keyfile: str | None,
        poll_seconds: float = POLL_SECONDS,
    ) -> None:
        self._context = context
        self._files = certfile, keyfile
        self.watch = FileWatch([file for file in self._files if file is not None], self.reload, poll_seconds)

    def reload(self) -> bool:
        """Read the files now; return whether they can be used."""
        self.watch.reading()
        try:
            _load(
                ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), *self._files
            )  # a failure would leave half of a pair
            _load(self._context, *self._files)
        except ConfigError as error:
            logger.warning("TLS files not reloaded, the previous ones stay in use: %s", error)
            return False
        logger.info("TLS certificate and key reloaded: %s", _named(*self._files))
        return True


def _load(context: ssl.SSLContext, certfile: str, keyfile: str | None) -> None:
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


def _named(certfile: str, keyfile: str | None) -> str:
    return " and ".join(filter(None, (certfile, keyfile)))


def _no_passphrase() -> str:
    raise EncryptedKey
