from __future__ import annotations

import os
import signal
from types import SimpleNamespace

import pytest

from headrace.config import ConfigError, options
from headrace.service import model_servers
from headrace.wiring import front_ends
from headrace.wiring.front_ends import FrontEnds, Ports, check_front_ends
from tests.service.test_model_servers import ENDS, LISTENS, Programs, until

CONNECTOR = '{"kv_connector": "SharedMemoryConnector", "kv_role": "kv_both", "kv_port": 14579}'


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"kv_transfer_config": CONNECTOR}, "--kv-transfer-config"),
    ],
)
def test_options_that_need_one_front_end_are_refused_by_name(given, named):
    with pytest.raises(ConfigError, match=f"--api-server-count: {named}"):
        check_front_ends(options({"model": "builtin", "api_server_count": 2, **given}))


def test_all_front_ends_have_sockets_at_one_port():
    ports = Ports(options({"model": "builtin", "port": 0}).server)
    made = [each for _ in range(3) for each in ports.sockets()]
    try:
        assert {each.getsockname()[1] for each in made} == {int(ports.url.rpartition(":")[2])}
    finally:
        for each in made:
            each.close()
        ports.close()


@pytest.mark.anyio
@pytest.mark.parametrize("lasting", [True, False])
async def test_the_server_ends_when_no_front_end_can_be_started_again(tmp_path, monkeypatch, lasting):
    monkeypatch.setattr(model_servers, "FIRST_DELAY_SECONDS", 0.001)
    own, ended = SimpleNamespace(getpid=os.getpid, kill=lambda pid, number: ended.append(number)), []
    monkeypatch.setattr(front_ends, "os", own)
    programs = Programs(LISTENS, LISTENS, *([LISTENS] if lasting else []), ENDS)
    ends = FrontEnds(2, "http://here", str(tmp_path), lambda name, path: programs())
    ends.owner, running = SimpleNamespace(connect=None), []
    ends.begin(running.append, "")
    await until(lambda: running)
    for each in ends.all:
        os.kill(each.pid, signal.SIGKILL)
    states = {model_servers.ModelState.FAILED, *([model_servers.ModelState.RUNNING] if lasting else [])}
    await until(lambda: {each.state for each in ends.all} == states)
    if lasting:
        assert (ended, ends.failure) == ([], "")
    else:
        await until(lambda: ended)
        assert ended == [signal.SIGTERM]
        assert "no front end could be started again" in ends.failure
    await ends.stop()
    ends.close()
