"""Messages between servers, and the handshake that verifies the shared secret and the compatibility of both servers.

```
 length of header u32, length of body u32, header as JSON, body         every message
 exporter ─ version, nonce ─> importer ─ nonce, proof, identity ─> exporter ─ proof, identity, area ─> importer
```
A proof is an HMAC-SHA256 over both nonces and the sender's identity, which prevents replay and modification. Clients
receive no information before their proof. Content is not encrypted.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import struct
from collections.abc import Mapping
from typing import Any

VERSION = 1

MOST_HEADER_BYTES = 1 << 14
MOST_BODY_BYTES = 1 << 22

_LENGTHS = struct.Struct("<II")

_WHAT = {
    "fingerprint": "weights",
    "dtype": "the type of the KV cache",
    "block_size": "block size",
    "block_bytes": "the bytes of a block",
    "layout": "the layout of blocks",
    "connector": "kv_connector",
}


class PeerRefused(Exception):
    """The two servers cannot exchange blocks; the message is one line."""


def send(link: socket.socket, header: Mapping[str, Any], body: bytes = b"") -> None:
    """Send one message. Raises OSError."""
    text = json.dumps(header).encode()
    link.sendall(_LENGTHS.pack(len(text), len(body)) + text + body)


def receive(link: socket.socket, most_body: int = MOST_BODY_BYTES) -> tuple[dict[str, Any], bytes]:
    """The next message. Raises OSError if the connection ends or the message is invalid."""
    header_bytes, body_bytes = _LENGTHS.unpack(_exactly(link, _LENGTHS.size))
    if header_bytes > MOST_HEADER_BYTES or body_bytes > most_body:
        raise ConnectionError("a message is too long")
    try:
        header = json.loads(_exactly(link, header_bytes))
    except ValueError as error:
        raise ConnectionError("a message is damaged") from error
    if not isinstance(header, dict):
        raise ConnectionError("a message is damaged")
    return header, _exactly(link, body_bytes)


def _exactly(link: socket.socket, count: int) -> bytes:
    content = bytearray()
    while len(content) < count:
        part = link.recv(count - len(content))
        if not part:
            raise ConnectionError("the connection was closed")
        content += part
    return bytes(content)


def accept(link: socket.socket, secret: bytes, identity: Mapping[str, Any]) -> Mapping[str, Any]:
    """The exporter's part of the handshake, except its last message; returns the client's identity.

    Raises:
        PeerRefused: the client does not know the secret or does not fit; the reason has been sent to it.
        OSError: the connection failed.
    """
    mine = secrets.token_hex(16)
    send(link, {"headrace_kv": VERSION, "nonce": mine})
    said, _ = receive(link, 0)
    nonces = f"{mine} {said.get('nonce')}"
    if not _equal(said.get("proof"), proof(secret, "importer", nonces, said.get("identity"))):
        send(link, {"refused": "the secret differs (--kv-transfer-secret)"})
        raise PeerRefused("its secret differs (--kv-transfer-secret)")
    problem = difference(identity, said["identity"])
    if problem:
        send(link, {"refused": problem})
        raise PeerRefused(problem)
    return said | {"nonces": nonces}


def welcome(
    link: socket.socket, secret: bytes, nonces: str, identity: Mapping[str, Any], facts: Mapping[str, Any]
) -> None:
    """The exporter's last message of the handshake, with ``facts`` about the connection."""
    stated = dict(identity) | {"facts": dict(facts)}
    send(link, {"identity": stated, "proof": proof(secret, "exporter", nonces, stated)})


def introduce(
    link: socket.socket, secret: bytes, identity: Mapping[str, Any], purpose: str
) -> Mapping[str, Any]:
    """The importer's part of the handshake; returns the exporter's facts about the connection.

    Raises:
        PeerRefused: the exporter does not know the secret or does not fit, or refuses this server.
        OSError: the connection failed.
    """
    began, _ = receive(link, 0)
    if began.get("headrace_kv") != VERSION:
        raise PeerRefused(
            f"it speaks version {began.get('headrace_kv')!r:.80} of the protocol, not {VERSION}"
        )
    nonce = secrets.token_hex(16)
    nonces = f"{began.get('nonce')} {nonce}"
    mine = dict(identity)
    send(
        link,
        {
            "nonce": nonce,
            "proof": proof(secret, "importer", nonces, mine),
            "identity": mine,
            "purpose": purpose,
        },
    )
    said, _ = receive(link, 0)
    if "refused" in said:
        raise PeerRefused(str(said["refused"]))
    stated = said.get("identity")
    if not _equal(said.get("proof"), proof(secret, "exporter", nonces, stated)):
        raise PeerRefused("its secret differs (--kv-transfer-secret)")
    facts = stated.get("facts") if isinstance(stated, dict) else None
    if not isinstance(facts, dict):
        raise ConnectionError("a message is damaged")
    return facts


def proof(secret: bytes, side: str, nonces: str, identity: object) -> str:
    """The HMAC of one side for these nonces."""
    said = json.dumps([side, nonces, identity], sort_keys=True).encode()
    return hmac.new(secret, said, "sha256").hexdigest()


def _equal(sent: object, proved: str) -> bool:
    """Whether a peer sent the expected proof, compared in constant time; ``sent`` may have any type."""
    return hmac.compare_digest(str(sent).encode(errors="replace"), proved.encode())


def difference(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """The first incompatible property of two servers, as one line; empty if they are compatible."""
    for name, value in mine.items():
        other = theirs.get(name)
        if other != value:
            what = _WHAT.get(name, name)
            values = "" if name == "fingerprint" else f": {value!r:.80} and {other!r:.80}"
            return f"the servers differ in {what}{values}"
    return ""
