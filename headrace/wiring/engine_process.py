"""The engine of a server in a process of its own (``--engine-process``).

```
 server: start_engine ── options ──> this program: load, warm up
                      <── description ──
                      the messages of `service.engine_process`
```
The engine's process has the weights, the device, the scheduler, the lower tiers, a recording and the models of
embeddings and scores, and publishes KV events. The server has the tokenizers, templates, caches and watchers. Both
compile grammars, each for its own use.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

from headrace.api.fronts.messages import SentPooling
from headrace.api.fronts.pooling import front_models, sent_models
from headrace.compute.checkpoint import ModelError
from headrace.compute.encoder.models import TextTokenizer
from headrace.compute.images.cache import ImageCache, ImageKeys
from headrace.compute.images.rows_file import RowsFile, SharedRows
from headrace.config import ConfigError, Options
from headrace.config.merge import Source
from headrace.core.knobs import Knobs
from headrace.core.tenancy.gate import Limits
from headrace.service.adapters import (
    ADD,
    BESIDE,
    RESTORE,
    RETIRE,
    AdapterQuestions,
    Adapters,
    RemoteAdapters,
)
from headrace.service.embedding_models import PoolingModels
from headrace.service.engine_host import EngineHost
from headrace.service.engine_process import READ_BYTES, STEP_BYTES, EngineProcess, FromEngine
from headrace.service.packing import Frames, Plain, frame, packed, unpacked
from headrace.service.remote_pooling import POOLING_QUESTIONS, PoolingQuestions
from headrace.service.sampling_defaults import DefaultsError
from headrace.service.service import Service
from headrace.text.rendering import TemplateError
from headrace.text.tokenizer import TokenizerError
from headrace.wiring.controls import EngineCounts, LocalControls, RemoteControls, answer
from headrace.wiring.embedding import load_pooling, runs_pooling, tokenizer_text, with_served
from headrace.wiring.image_encoding import LocalEncoding, background_beside, slices_beside
from headrace.wiring.loading.images import OpenImages
from headrace.wiring.loading.text import ModelText, load_text
from headrace.wiring.memory_sleep import file_identities
from headrace.wiring.model import Loaded, LoadedFacts, ReadyModel, load, make_compiler, served_names, warm_up
from headrace.wiring.observability import open_kv_events, start_log
from headrace.wiring.recording import open_recording
from headrace.wiring.remote_images import (
    IMAGE_QUESTIONS,
    ImageQuestions,
    RemoteEncoding,
    with_places,
    with_rows,
)
from headrace.wiring.tenants import read_tenants

OPTION = "--engine-process"

PROGRAM = "headrace.wiring.engine_process"
"""The program of the engine's process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Description(LoadedFacts):
    """What the engine's process tells of its model, and of its `Controls`."""

    gpu_uuid: str
    knobs: Knobs
    overlap: int
    proposes_cached: bool
    counts: EngineCounts
    no_images: str
    images: ImageKeys | None
    pooling: SentPooling


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteModel(ReadyModel):
    """A model whose engine has its own process."""

    process: EngineProcess
    remote: RemoteControls
    uuid: str
    pooling: PoolingModels

    @property
    def controls(self) -> RemoteControls:
        return self.remote

    @property
    def gpu_uuid(self) -> str:
        return self.uuid

    def open_service(self, limits: Limits, **options: Any) -> Service:
        return Service(self.process, limits, **options)

    def warm_up(self) -> None:
        """Its process has done so."""

    def close(self, stopped: bool) -> str:
        saved = self.process.close()
        self.grammars.close()
        return saved


def check_engine_process(options: Options) -> None:
    """Refuse options that need the engine in the server's process, before anything is loaded.

    Raises:
        ConfigError: an option needs it.
    """
    model = options.model
    for given, option in (
        (model.tensor_parallel_size > 1, "--tensor-parallel-size"),
        (model.pipeline_parallel_size > 1, "--pipeline-parallel-size"),
        (options.cache.kv_transfer_config is not None, "--kv-transfer-config"),
        (runs_pooling(model), "a model for embeddings or scores alone"),
    ):
        if given:
            raise ConfigError(
                f"{OPTION}: {option} needs the engine in the server's process; leave one of them out"
            )


def start_engine(options: Options) -> RemoteModel:
    """Start the engine's process, and wait until its model is loaded and warm.

    Raises:
        ConfigError: an option cannot be satisfied.
    """
    check_engine_process(options)
    rows = RowsFile()
    ours, child = _start_process(options, rows)
    process = EngineProcess(ours, child, sent=with_places)
    try:
        text = partial(load_text, options.model, options.server.tool_call_parser)
        return _described(options, process, text(), received_description(ours), rows)
    except BaseException as error:
        process.end()
        if isinstance(error, ModelError | TokenizerError | TemplateError | DefaultsError):
            raise ConfigError(str(error)) from error
        raise


def _start_process(options: Options, rows: RowsFile) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Start a process, which inherits the file of ``rows``, and send it the options.

    Raises:
        OSError: it cannot be started.
    """
    ours, theirs = socket.socketpair()
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, STEP_BYTES)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, STEP_BYTES)
    inherited = theirs.fileno(), rows.fd
    command = [sys.executable, "-m", PROGRAM, *map(str, inherited)]
    with theirs, _ignored_signals():
        child = subprocess.Popen(command, pass_fds=inherited, stdin=subprocess.DEVNULL)
    # Options of a reload, with their secrets and files, are the server's.
    ours.sendall(frame(packed(Options, replace(options, source=Source()))))
    return ours, child


LASTING = frozenset({"set_knobs", "set_tenants", "set_class_shares", "set_log_level"})
"""The questions that change settings: a process that is started again is asked them again."""

MODEL_FILES = frozenset({".json", ".safetensors", ".gguf"})


def model_files(folder: Path) -> Sequence[Path]:
    """A model's files, which change if another model is put in its place."""
    return [folder] if folder.is_file() else [each for each in folder.iterdir() if each.suffix in MODEL_FILES]


class EngineSuccessors:
    """The processes that ``start`` starts in place of the first one, which ``first`` describes."""

    lasting = LASTING

    def __init__(
        self, start: Callable[[], tuple[socket.socket, subprocess.Popen[bytes]]], first: Description
    ) -> None:
        self._start = start
        self._first = first
        self._files = file_identities(model_files(first.folder))

    def start(self) -> tuple[socket.socket, subprocess.Popen[bytes]]:
        return self._start()

    def accept(self, description: Plain) -> Plain:
        model = unpacked(Description, description)
        compared = attrgetter("folder", "shape", "dtype", "quantization", "kv_dtype")
        files = file_identities(model_files(model.folder))
        if compared(model) != compared(self._first) or files != self._files:
            raise ValueError(
                f"the files of the model in {model.folder} have changed since the server started"
            )
        return packed(EngineCounts, model.counts)


@contextmanager
def _ignored_signals() -> Iterator[None]:
    """A child started here ignores the signals that end a server, which it would get too: the server ends it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {each: signal.signal(each, signal.SIG_IGN) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def received_description(connection: socket.socket) -> Description:
    """The description that the process sends when its model is warm.

    Raises:
        ConfigError: it has refused an option, or ended.
    """
    frames, messages = Frames(), list[Plain]()
    while not messages:
        received = connection.recv(READ_BYTES)
        if not received:
            raise ConfigError(f"{OPTION}: the engine's process has ended; its messages above say why")
        messages = frames.feed(received)
    (kind, content), *_ = messages
    if kind == FromEngine.REFUSED:
        raise ConfigError(content)
    return unpacked(Description, content)


def _described(
    options: Options, process: EngineProcess, text: ModelText, model: Description, rows: RowsFile
) -> RemoteModel:
    tenants, classes = read_tenants(options.scheduler.tenants)
    process.counts = packed(EngineCounts, model.counts)
    # A recording ends with the first process, so that it is not overwritten. Adapters are those of that time.
    later = replace(options, server=replace(options.server, record_trace=None, lora_modules=()))
    process.successors = EngineSuccessors(partial(_start_process, later, rows), model)
    return RemoteModel(
        **model.found() | {"notes": (*model.notes, "the engine has its own process")},
        name=served_names(options.model)[0],
        grammars=make_compiler(text.tokenizer, model.shape.vocab_size),
        tokenizer=text.tokenizer,
        template=text.template,
        defaults=text.defaults,
        seed=options.model.seed,
        dummy=options.model.load_format == "dummy",
        policy=options.scheduler.scheduling_policy,
        tenants=tenants,
        classes=classes,
        images=_remote_images(options, process, model, rows),
        adapters=RemoteAdapters(process) if options.adapters.enable_lora else None,
        process=process,
        remote=RemoteControls(process, model.knobs, model.overlap, model.proposes_cached),
        uuid=model.gpu_uuid,
        pooling=front_models(
            model.pooling, lambda each: TextTokenizer.from_text(each.tokenizer, each.lower_case)
        ),
    )


def _remote_images(
    options: Options, process: EngineProcess, model: Description, rows: RowsFile
) -> OpenImages:
    if model.images is None:
        return OpenImages(why=model.no_images)
    encoding = RemoteEncoding(process, model.images, rows)
    return OpenImages(None, ImageCache(options.images.cache_bytes), "", encoding)


# The program of the engine's process.


def run(connection: socket.socket, rows: int, options: Options) -> None:
    """Load the model, tell the server of it, and serve its engine until the server stops or ends.

    ``rows`` is the descriptor of the server's `RowsFile`.

    Raises:
        ConfigError: an option cannot be satisfied.
    """
    recording = open_recording(options.server)
    models = load_pooling(options)
    loaded = load(options, recording.tell if recording else None)
    models = with_served(models, options, loaded)
    kv_events = open_kv_events(loaded, options)
    warm_up(loaded)
    controls = loaded.controls
    images = _image_questions(loaded, rows, lambda *given, **named: host.call(*given, **named))
    host = EngineHost(
        connection,
        loaded.engine,
        partial(_answer, controls, loaded.adapters, images, PoolingQuestions(models)),
        lambda: packed(EngineCounts, controls.counts),
        loaded.runner.interrupt,
        BESIDE | IMAGE_QUESTIONS,
        partial(with_rows, SharedRows(rows, loaded.decoder.device)),
    )
    connection.sendall(frame((FromEngine.DESCRIBED, packed(Description, _description(loaded, models)))))
    halted = host.run()
    if images is not None:
        images.close()
    saved = loaded.close(halted)
    for each in (recording, kv_events):
        if each is not None:
            each.close()
    host.closed(saved)  # last: the server ends this process soon after


def _image_questions(loaded: Loaded, rows: int, call: Callable[..., Future[Any]]) -> ImageQuestions | None:
    """What answers questions about images; ``call`` is `EngineHost.call`. None if the model takes none."""
    encoder = loaded.images.encoder
    if encoder is None:
        return None

    def between_steps(function: Callable[[], None], last: bool) -> asyncio.Future[None]:
        return asyncio.wrap_future(call(function, last))

    given = loaded.engine, loaded.facts.kind
    slices = slices_beside(*given, between_steps)
    return ImageQuestions(LocalEncoding(encoder, slices, background_beside(*given, call)), rows)


def _answer(
    controls: LocalControls,
    adapters: Adapters | None,
    images: ImageQuestions | None,
    pooling: PoolingQuestions,
    name: str,
    arguments: Sequence[Plain],
) -> Plain:
    if name in POOLING_QUESTIONS:
        return pooling.answer(name, *arguments)
    if images is not None and name in IMAGE_QUESTIONS:
        return images.answer(name, *arguments)
    if adapters is not None and name in (ADD, RESTORE, RETIRE):
        return AdapterQuestions(adapters).answer(name, *arguments)
    return answer(controls, name, arguments)


def _description(loaded: Loaded, models: PoolingModels) -> Description:
    controls, encoder = loaded.controls, loaded.images.encoder
    return Description(
        **loaded.found(),
        gpu_uuid=loaded.gpu_uuid,
        knobs=controls.knobs,
        overlap=controls.overlap,
        proposes_cached=controls.proposes_cached,
        counts=controls.counts,
        no_images=loaded.images.why,
        images=None if encoder is None else encoder.keys,
        pooling=sent_models(models, tokenizer_text),
    )


def main() -> None:
    """Run the program. Its arguments are the descriptors of its socket and of the file of rows."""
    connection, rows = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    frames, messages = Frames(), list[Plain]()
    while not messages:
        received = connection.recv(READ_BYTES)
        if not received:
            return
        messages = frames.feed(received)
    options = unpacked(Options, messages[0])
    log = start_log(options.observability)
    try:
        run(connection, rows, options)
    except ConfigError as error:
        connection.sendall(frame((FromEngine.REFUSED, str(error))))
    finally:
        log.flush()


if __name__ == "__main__":
    main()
