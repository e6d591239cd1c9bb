from __future__ import annotations

import pytest

from headrace.cli.bench.targets import BadSpec, parse


def test_targets_are_named_on_a_command_line() -> None:
    plain = parse("headrace")
    assert (plain.name, plain.kind, plain.url, dict(plain.options)) == ("headrace", "headrace", "", {})
    tuned = parse("small=headrace-static,max-num-seqs=16,overlap=0")
    assert (tuned.name, tuned.kind) == ("small", "headrace-static")
    assert dict(tuned.options) == {"max_num_seqs": "16", "overlap": "0"}
    server = parse("peer=http://127.0.0.1:8001/v1,concurrency=32")
    assert (server.name, server.kind, server.url) == ("peer", "http", "http://127.0.0.1:8001/v1")
    unnamed = parse("http://127.0.0.1:8001")
    assert unnamed.name == unnamed.url == "http://127.0.0.1:8001"


@pytest.mark.parametrize("text", ["", "nothing", "headrace,overlap", "headrace,=1", "http", "ftp://x"])
def test_what_cannot_be_understood_is_refused(text: str) -> None:
    with pytest.raises(BadSpec):
        parse(text)
