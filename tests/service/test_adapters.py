"""The names of adapters, without a server."""

from __future__ import annotations

import asyncio
import socket
import threading
from pathlib import Path

import pytest

from headrace.core.adapters import AdapterError
from headrace.core.events import EngineLost
from headrace.core.request import FinishReason
from headrace.service import adapters
from headrace.service.adapters import BESIDE, AdapterNames, AdapterQuestions, RemoteAdapters
from headrace.service.engine_host import EngineHost
from headrace.testing.engines import hashing_engine
from tests.doubles.engine_processes import Child, House, Successors, read, running
from tests.doubles.services import SOON, Leash, request


class Shelf:
    """Every folder has an adapter, whose digest is its name."""

    def add(self, folder: Path) -> str:
        return folder.name

    def retire(self, adapter: str) -> None:
        pass


def test_the_name_of_a_loaded_adapter_is_never_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.service.adapters.MAX_REMEMBERED", 2)
    names = AdapterNames(Shelf(), ())
    loaded = [names.add(f"n{at}", f"/a/{at}") for at in range(5)]
    assert [names.name_of(each.digest) for each in loaded] == ["n0", "n1", "n2", "n3", "n4"]
    for each in loaded[:3]:
        names._drop(each.name)
    assert [names.name_of(each.digest) for each in loaded] == ["", "n1", "n2", "n3", "n4"]


def test_an_adapter_that_is_loaded_again_has_its_present_name() -> None:
    names = AdapterNames(Shelf(), ())
    names.add("old", "/a/0")
    names.add("new", "/a/0")
    names._drop("old")
    assert names.name_of("0") == "new"


def test_the_name_of_another_model_is_refused() -> None:
    with pytest.raises(AdapterError, match="'embed' is that of a served model"):
        AdapterNames(Shelf(), ("m", "embed")).add("embed", "/a/0")


@pytest.mark.parametrize("path", ["/a\0b", "/\ud800", "~no_such_user/a"])
def test_a_path_that_names_no_folder_is_refused(path: str) -> None:
    with pytest.raises(AdapterError, match="the path"):
        AdapterNames(Shelf(), ()).add("n", path)


pytestmark = pytest.mark.anyio


class Store:
    """Reads adapters whose folders are not called ``bad``, while ``gate`` is set."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.asked: list[tuple[str, str]] = []

    def add(self, folder: Path) -> str:
        assert self.gate.wait(SOON)
        self.asked.append(("add", folder.name))
        if folder.name == "bad":
            raise AdapterError("its rank is too high")
        return f"digest of {folder.name}"

    def retire(self, adapter: str) -> None:
        self.asked.append(("retire", adapter))


def house(store: Store) -> House:
    made = House(Child(-9))
    made.host = EngineHost(
        made.theirs,
        made.engine,
        lambda name, arguments: AdapterQuestions(store).answer(name, *arguments),
        lambda: 0,
        beside=BESIDE,
    )
    made.thread.start()
    return made


def ended(made: House) -> None:
    made.process.end()
    made.theirs.close()
    made.thread.join(SOON)
    assert not made.thread.is_alive()


async def test_adapters_are_added_before_and_while_the_server_runs():
    store = Store()
    made = house(store)
    try:
        names = AdapterNames(RemoteAdapters(made.process), ("model",))
        assert names.add("first", "/x/first").digest == "digest of first"
        with pytest.raises(AdapterError, match="rank is too high"):
            names.add("second", "/x/bad")
        made.service.start()
        store.gate.clear()  # a slow disk
        loading = asyncio.create_task(names.load("third", "/x/third"))
        await asyncio.sleep(0)
        answer = made.service.open([request("a")])
        assert (await read(answer))[-1].reason is FinishReason.LENGTH
        made.service.close(answer)
        assert not loading.done()
        store.gate.set()
        assert (await asyncio.wait_for(loading, SOON)).digest == "digest of third"
        with pytest.raises(AdapterError, match="rank is too high"):
            await names.load("fourth", "/x/bad")
        await names.unload("first")
        await names.load("fifth", "/x/fifth")  # after the message that retires
        assert store.asked[-2:] == [("retire", "digest of first"), ("add", "fifth")]
    finally:
        ended(made)


async def test_an_engine_that_ends_ends_the_wait():
    made = house(Store())
    names = AdapterNames(RemoteAdapters(made.process), ())
    made.theirs.shutdown(socket.SHUT_RDWR)
    made.thread.join(SOON)
    with pytest.raises(RuntimeError, match="engine"):
        names.add("first", "/x/first")
    made.process.end()


class Served(Successors):
    """Processes that read adapters; each has its own store. The first one stops after three steps."""

    def __init__(self) -> None:
        super().__init__(make=self.made)
        self.stores: list[Store] = []

    def made(self):
        engine, runner = hashing_engine(overlap=1)
        if len(self.engines) == 0:
            self.leash = Leash(runner, 3)
        return engine

    def answer(self, number, name, arguments):
        while len(self.stores) <= number:
            self.stores.append(Store())
        self.asked[number].append((name, *arguments))
        return AdapterQuestions(self.stores[number]).answer(name, *arguments)


async def test_another_process_gets_the_adapters_before_requests(monkeypatch):
    monkeypatch.setattr(adapters, "MOST_RETIRED", 1)
    successors = Served()
    async with running(successors) as (service, process, seen):
        names = AdapterNames(RemoteAdapters(process), ())
        for each in "abcd":
            await names.load(each, f"/x/{each}")
        await names.unload("a")
        await names.unload("b")
        await service.between_steps(lambda: None)
        answer = service.open([request("r", max_tokens=30)])
        await asyncio.wait_for(answer.read(), SOON)
        process._connection.shutdown(socket.SHUT_RDWR)
        successors.leash.free.set()
        assert (await read(answer))[-1].reason is FinishReason.LENGTH
        service.close(answer)
        service.count()
        assert seen.of(EngineLost)
        assert successors.asked[1] == [("restore_adapter", f"/x/{each}") for each in "bcd"]
        assert (await names.load("e", "/x/e")).digest == "digest of e"
