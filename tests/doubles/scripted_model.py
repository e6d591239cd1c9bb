"""A model that says what a script says, behind a real server on a port of its own.

For clients and agents: the first prompt that comes gets the first text of the script, the next new prompt the next
one, and so on. Or a function picks the text by the prompt. Texts are raw: reasoning and calls stand in them as a model
writes them.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import tokenizers
import uvicorn

from headrace.text.tokenizer import Tokenizer
from tests.doubles.grammars import Compiled
from tests.text.vocabularies import SPECIAL_TOKENS, byte_level


def with_special_tokens(texts: Sequence[str], special: bool = True) -> Tokenizer:
    """A tokenizer to which ``texts`` are tokens of their own, as markers are to many models: special ones, or plain
    ones, as to Qwen's."""
    backend = tokenizers.Tokenizer.from_str(byte_level().backend.to_str())
    if special:
        backend.add_special_tokens(list(texts))
    else:
        backend.add_tokens([tokenizers.AddedToken(each, special=False, normalized=False) for each in texts])
    return Tokenizer(backend, SPECIAL_TOKENS)


@dataclass
class Script:
    """What the model says, in order or by its prompt. ``prompts`` are the ones that it has answered, as text."""

    tokenizer: Tokenizer
    texts: Sequence[str] | Callable[[str], str]
    prompts: list[str] = field(default_factory=list)
    _told: dict[tuple[int, ...], list[int]] = field(default_factory=dict)

    def reply(self, prompt: tuple[int, ...], seed: int) -> list[int]:
        """The tokens of the answer to ``prompt``; a prompt that comes again gets the same."""
        if prompt not in self._told:
            asked = self.tokenizer.decode(prompt, skip_special_tokens=False)
            text = self._next(asked)
            self._told[prompt] = self.tokenizer.encode(text, add_special_tokens=False)
            self.prompts.append(asked)
        return self._told[prompt]

    def _next(self, asked: str) -> str:
        if callable(self.texts):
            return self.texts(asked)
        return self.texts[min(len(self._told), len(self.texts) - 1)]


@dataclass
class ScriptedServer:
    url: str
    script: Script


@contextmanager
def scripted_server(texts: Sequence[str] | Callable[[str], str], **options: Any) -> Iterator[ScriptedServer]:
    """A server whose model says ``texts``; ``options`` as those of the tests' `house`."""
    from tests.api.conftest import build_house

    tokenizer = options.setdefault("tokenizer", byte_level())
    options.setdefault("grammars", Compiled())
    script = Script(tokenizer, texts)
    wide = {"max_model_len": 4096, "num_blocks": 4096, "queued_tokens": 100_000}
    _, app = build_house(wide | options | {"reply": script.reply})
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=2))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [free]}, daemon=True)
        thread.start()
        while not server.started:
            assert thread.is_alive(), "the server ended"
            time.sleep(0.01)
        try:
            yield ScriptedServer(f"http://127.0.0.1:{port}/v1", script)
        finally:
            server.should_exit = True
            thread.join(10)
