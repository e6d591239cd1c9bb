"""The road in: from the bytes of a chat body to `Service.submit`, through a response cache."""

import re
import sys
from itertools import groupby
from pathlib import Path

from starlette.requests import Request
from starlette.testclient import TestClient

from headrace.api.compile.draft import ChatDraft
from headrace.api.compile.submit import open_chat
from headrace.response_cache.query import CacheQuery, LookupRequest
from headrace.service.service import Service
from tests.api.caching import with_memory
from tests.api.conftest import build_house
from tests.structure.test_laws import PACKAGE, ROOT

MOST_STOPS, MOST_FILES = 12, 9
CALL = {"messages": [{"role": "user", "content": "Which road?"}], "max_tokens": 5, "temperature": 0}
VALUES = (Request, ChatDraft, LookupRequest, CacheQuery)
"""The forms of a call after each other. Between the first two it is bytes, and the typed body that `open_chat` gets."""


def is_call(value: object) -> bool:
    """Whether ``value`` is the whole call, and not a part of it."""
    if isinstance(value, list | tuple) and value and not isinstance(value, VALUES):
        value = value[0]
    return isinstance(value, VALUES) or (isinstance(value, bytes) and b'"messages"' in value)


class Walk:
    """The files whose functions receive the whole call, in the order of these calls, up to `Service.submit`.

    A method of the call's own value is no stop, nor is a function that checks the fields of a body.
    """

    def __init__(self, app):
        self._app = app
        self.files: list[str] = []
        self._frames = []  # kept, because a coroutine is entered again after each wait

    async def __call__(self, scope, receive, send):
        if scope["type"] == "http":
            sys.setprofile(self._enter)
        await self._app(scope, receive, send)

    def _enter(self, frame, event, arg):
        code = frame.f_code
        path = Path(code.co_filename)
        if event != "call" or PACKAGE not in path.parents or any(frame is each for each in self._frames):
            return
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        given = [frame.f_locals.get(name) for name in names if name != "self"]
        ends = code is Service.submit.__code__
        made = code.co_name == "__init__"
        if ends or (any(map(is_call, given)) and not made) or code is open_chat.__code__:
            self._frames.append(frame)
            self.files.append(str(path.relative_to(ROOT)))
        if ends:
            sys.setprofile(None)


def walked() -> list[str]:
    """The stops of a chat body: runs of calls in one file."""
    _, app = build_house({"lookup": with_memory})
    walk = Walk(app)
    with TestClient(walk) as client:
        assert client.post("/v1/chat/completions", json=CALL).status_code == 200
    return [file for file, _ in groupby(walk.files)]


def test_a_chat_body_makes_few_stops_and_each_is_in_the_reading_list():
    stops = walked()
    assert stops[0].endswith("openai/routes.py")
    assert stops[-1].endswith("service/service.py")
    assert len(stops) <= MOST_STOPS, stops
    assert len(set(stops)) <= MOST_FILES, sorted(set(stops))
    page = (ROOT / "ARCHITECTURE.md").read_text().split("## What to read in a day")[1]
    assert set(stops) <= set(re.findall(r"`(headrace/\S+\.py)`", page))
