"""The guide to memory: its command starts a server, and the metrics that it names are there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from tests.server.conftest import serving

GUIDE = (Path(__file__).parents[2] / "docs" / "guide" / "memory.md").read_text()


def test_what_it_says_to_type_runs(tmp_path):
    (command,) = re.findall(r"```bash\nheadrace serve (--kv-offload-bytes .*)\n```", GUIDE)
    flags = [str(tmp_path / word) if word == "kv-blocks" else word for word in shlex.split(command)]
    with serving(*flags) as server:
        server.post("/v1/completions", {"model": "builtin", "prompt": "Once", "max_tokens": 2})
        shown = server.get("/metrics").text
        for name in re.findall(r"^\| `headrace:(\w+)", GUIDE, re.MULTILINE):
            assert f"headrace:{name}" in shown, name
        assert re.findall(r"(\w+) tier", "\n".join(server.lines)) == ["host", "disk"]
    assert list(tmp_path.iterdir()) == [tmp_path / "kv-blocks"]
