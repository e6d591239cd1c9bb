"""`LLM`: the engine in this process, without a server and without an engine thread."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Self, Unpack

from headrace.core.events import Admitted, Emitted, Event, Finished, PromptScored
from headrace.core.request import FinishReason, Request, SamplingParams
from headrace.llm.embedding import compute, embedding_task, pairs_of, score_task
from headrace.llm.images import ChatImages, Message
from headrace.llm.job import AdapterChoice, Job, JobMaker, Prompt, each_prompt, engine_options
from headrace.llm.options import LLMOptions
from headrace.llm.outputs import CompletionDelta, EmbeddingOutput, RequestOutput, ScoreOutput
from headrace.observe.cost.ledger import CostLedger
from headrace.text.stream import TextStreams
from headrace.text.tokenizer import Tokenizer
from headrace.wiring.embedding import load_pooling, runs_pooling, with_served
from headrace.wiring.engine import make_ledger, make_pricing
from headrace.wiring.model import Loaded, close, load

# One engine for the calls of several threads: their requests run in the same steps.
#
#  call 1 ─ submit ┐                      ┌ events of call 1 ─ its job
#  call 2 ─ submit ┴─ inbox ─ engine.step ┴ events of call 2 ─ its job
#
# There is no engine thread. Of the threads that wait for their jobs one runs the steps, for the requests of
# all. When its own job has news it returns to its caller, and another waiting thread goes on.

POLL_SECONDS = 0.1
"""How often a waiting thread looks for a deferred Ctrl-C."""


class Turns:
    """Lets one thread compute at a time.

    A turn belongs to a thread until `release`. A thread that waits for one gives a ``key``, by which `notify` finds it.
    Nothing here allocates while the lock is held but in a consistent state: the garbage collector may call `when_free`
    from any allocation, so the lock can be taken again by its own thread.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._owner: int | None = None
        self._waiting: dict[object, threading.Condition] = {}
        self._once = 0  # of them, those that want a single turn
        self._arrived = threading.Condition(self._lock)
        self._process = os.getpid()

    @property
    def wanted(self) -> bool:
        """Whether a thread waits for a single turn, for which a thread of many turns should release its own."""
        return self._once > 0

    def is_own_process(self) -> bool:
        """Whether this is not a forked child, where the threads that compute do not exist."""
        return self._process == os.getpid()

    def require_caller(self) -> None:
        """Raise RuntimeError in a forked child, and on the thread whose turn it is: a call from inside a step."""
        if not self.is_own_process():
            raise RuntimeError(
                "this LLM was made by another process and does not work after a fork; make one in each process,"
                " or start processes with the method 'spawn'"
            )
        if self._owner == threading.get_ident():
            raise RuntimeError("an LLM cannot be called from inside one of its own steps")

    def take(self, key: object, done: Callable[[], bool], check: Callable[[], None]) -> bool:
        """Wait for a turn; False if ``done()`` became true before. ``check`` may end the waiting by an exception.

        Raises:
            RuntimeError: see `require_caller`.
        """
        self.require_caller()
        with self._lock:
            mine = self._waiting[key] = threading.Condition(self._lock)
            try:
                while not done():
                    if self._owner is None and next(iter(self._waiting)) is key:
                        self._owner = threading.get_ident()
                        return True
                    mine.wait(POLL_SECONDS)
                    check()
                return False
            finally:
                del self._waiting[key]
                if self._owner is None:
                    self._wake_next()

    def release(self, finish: Callable[[], None] = lambda: None) -> None:
        """End this thread's turn, after a last ``finish()``; no `when_free` comes between the two."""
        with self._lock:
            try:
                finish()
            finally:
                self._owner = None
                self._wake_next()

    @contextmanager
    def once(self) -> Iterator[None]:
        """A single turn for the block."""
        with self._lock:
            self._once += 1
        try:
            self.take(object(), lambda: False, lambda: None)
        finally:
            with self._lock:
                self._once -= 1
        try:
            yield
        finally:
            self.release()

    def when_free(self, action: Callable[[], None]) -> None:
        """Call ``action`` as a turn of its own if no thread has one now; otherwise its owner must do it."""
        with self._lock:
            if self._owner is None:
                self._owner = threading.get_ident()
                self.release(action)

    def notify(self, keys: Iterable[object]) -> None:
        """Let the threads that wait with these keys call their ``done``."""
        with self._lock:
            for key in keys:
                if key in self._waiting:
                    self._waiting[key].notify()

    def arrived(self) -> None:
        """End the `rest` of the thread whose turn it is."""
        with self._lock:
            self._arrived.notify()

    def rest(self, seconds: float, idle: Callable[[], bool]) -> None:
        """Wait during this thread's turn, until something has `arrived` or it is no longer ``idle``."""
        with self._lock:
            if idle():
                self._arrived.wait(seconds)

    def _wake_next(self) -> None:
        if self._waiting:
            next(iter(self._waiting.values())).notify()


class SharedEngine:
    """The engine of ``loaded`` until it is ``closed``; the threads that wait for their jobs step it in ``turns``."""

    def __init__(self, loaded: Loaded, ledger: CostLedger, turns: Turns, closed: Callable[[], bool]) -> None:
        self.jobs: dict[str, Job] = {}
        """The job of each open request, by the request's id."""
        self._loaded = loaded
        self._ledger = ledger
        self._turns = turns
        self._closed = closed
        self._inbox: deque[Request | str] = deque()  # requests to submit, and ids of requests to cancel

    def submit(self, job: Job) -> None:
        """Let the requests of a job run from the next step on."""
        for request in job.requests:
            self.jobs[request.id] = job
        self._inbox.extend(job.requests)
        self._turns.arrived()

    def abandon(self, job: Job) -> None:
        """Cancel the open requests of a job; their later events are ignored."""
        for request_id in list(job.open):
            if self.jobs.pop(request_id, None) is not None:
                self._inbox.append(request_id)
        self._turns.when_free(self._empty_inbox)

    def run_until_news(self, job: Job, check: Callable[[], None]) -> None:
        """Return as soon as a job has news, or the engine is closed; run steps meanwhile if no other thread does.

        ``check`` is called between steps, and may end the waiting by an exception.
        """
        while not job.has_news() and self._turns.take(job, lambda: job.has_news() or self._closed(), check):
            try:
                while not (job.has_news() or self._turns.wanted):
                    self._step()
                    check()
            finally:
                self._turns.release(self._empty_inbox)

    def _empty_inbox(self) -> None:
        """Submit and cancel what has arrived; during a turn."""
        engine = self._loaded.engine
        while self._inbox and not self._closed():
            arrival = self._inbox.popleft()
            if isinstance(arrival, Request):
                engine.submit(arrival, arrival.arrived)
            else:
                engine.cancel(arrival, FinishReason.CANCELLED, time.monotonic())

    def _step(self) -> None:
        engine, now = self._loaded.engine, time.monotonic()
        self._empty_inbox()
        due = engine.wake_at(now)
        if due is not None and due > now:
            self._turns.rest(due - now, lambda: not self._inbox)
            self._empty_inbox()
        events = engine.step(time.monotonic())
        now = time.monotonic()
        for event in events:
            self._ledger.fold(event, now)
        changed = {job for event in events if (job := self._take(event)) is not None}
        self._turns.notify(job for job in changed if job.has_news())

    def _take(self, event: Event) -> Job | None:
        """The job that an event has changed."""
        if not isinstance(event, Emitted | Finished | Admitted | PromptScored):
            return None
        job = self.jobs.get(event.request_id)
        if job is None:
            return None
        now = time.monotonic()
        if isinstance(event, Finished):
            self.jobs.pop(event.request_id, None)
            job.charge(event.request_id, self._ledger.cost(event.request_id))
        if job.take(event, now):
            self._loaded.engine.cancel(event.request_id, FinishReason.STOP, now)
        return job


_BAR = threading.Lock()
"""Rich shows one live display of a terminal at a time."""


@contextmanager
def interrupts_between_steps() -> Iterator[Callable[[], None]]:
    """Defer Ctrl-C until the yielded function is called: inside a step it would leave a plan half executed.

    A second Ctrl-C takes effect at once, in case a step hangs. Only Python's own handler is deferred, and only in the
    main thread, which is the one that it interrupts.
    """
    elsewhere = threading.current_thread() is not threading.main_thread()
    if elsewhere or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield lambda: None
        return
    deferred = False

    def defer(number: int, frame: FrameType | None) -> None:
        nonlocal deferred
        if deferred:
            signal.default_int_handler(number, frame)
        deferred = True

    def raise_deferred() -> None:
        if deferred:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, defer)
    try:
        yield raise_deferred
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def progress_bar(total: int, shown: bool, what: str = "generating") -> Iterator[Callable[[int], None]]:
    """Yields a function to call with the number of tokens of each finished request.

    Calls of several threads show one bar: that of the first, until it ends.
    """
    if not shown or not _BAR.acquire(blocking=False):
        yield lambda tokens: None
        return
    try:
        with _shown_bar(total, what) as advance:
            yield advance
    finally:
        _BAR.release()


@contextmanager
def _shown_bar(total: int, what: str) -> Iterator[Callable[[int], None]]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[speed]}"), transient=True) as bar:
        task = bar.add_task(what, total=total, speed="")
        began = time.monotonic()
        done = 0

        def advance(tokens: int) -> None:
            nonlocal done
            done += tokens
            speed = done / max(time.monotonic() - began, 1e-9)
            bar.update(task, advance=1, speed=f"{speed:.0f} tok/s")

        yield advance


class LLM:
    """A model and its engine in this process, for any number of threads, whose requests run in the same steps.

    Each step runs on a thread that waits for its outputs. Use it as a context manager to release threads, memory and
    files at the end of the block.

    Args:
        model: a local folder, a GGUF file, a hub name, or ``"builtin"``.
        given: options of the model, the KV cache, the scheduler, prices and embeddings, as on the command line but with
            underscores (``max_num_seqs=8``).

    Raises:
        ConfigError: an option is invalid, or the model cannot be loaded.
    """

    def __init__(self, model: str = "builtin", **given: Unpack[LLMOptions]) -> None:
        options = engine_options(model, given)
        pricing = make_pricing(options.cost)
        self._pooling = load_pooling(options)
        self._loaded = None if runs_pooling(options.model) else load(options)
        self._turns = Turns()
        self._closed = False
        if self._loaded is not None:
            self._pooling = with_served(self._pooling, options, self._loaded)
            controls = self._loaded.controls
            ledger = make_ledger(pricing, lambda: controls.counts.coefficients)
            self._shared = SharedEngine(self._loaded, ledger, self._turns, lambda: self._closed)
            self._streams = TextStreams(self._loaded.tokenizer)
            self._images = ChatImages(self._loaded.images, options.images)
            self._make = JobMaker(self._loaded, self._images, lambda: self._streams)

    @property
    def loaded(self) -> Loaded:
        """The model that generates, and its engine.

        Raises:
            RuntimeError: this is a model for embeddings or scores only.
        """
        if self._loaded is None:
            raise RuntimeError("this model generates no text; it computes embeddings or scores")
        return self._loaded

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the model that generates."""
        return self.loaded.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """The sampling parameters of calls that give none: those of the model's ``generation_config.json``."""
        return self.loaded.defaults.params

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Release threads and files; with ``kv_offload_path`` the KV cache is saved for the next run.

        It waits for the step that runs; calls of other threads then raise RuntimeError. A second call does nothing, and
        neither does one in a forked child, where nothing is to be released.
        """
        if self._closed or not self._turns.is_own_process():
            return
        with self._turns.once():
            if self._closed:
                return
            self._closed = True
            if self._loaded is not None:
                self._images.close()
                close(self._loaded)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        n: int = 1,
        lora_request: AdapterChoice = None,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Complete each prompt (text, or token ids), ``n`` times, with the adapter ``lora_request`` if there is one.

        Prompts with a common prefix run together, in any order.

        Returns:
            One output per prompt, in order.

        Raises:
            InvalidParameter: a prompt or parameter is invalid; nothing was run.
            KeyboardInterrupt: Ctrl-C was pressed; raised after the current step. As after any other error of a step,
                all requests of the call are cancelled, and the next call works.
            RuntimeError: the LLM is closed or belongs to another process, or the call comes from inside a step.
        """
        return self._run(
            self._jobs_of().completions(prompts, sampling_params, n, lora_request, streamed=False), progress
        )

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        n: int = 1,
        lora_request: AdapterChoice = None,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of several, through the model's chat template.

        Parts of type ``image_url`` and ``image_pil`` are images, if the model takes some.
        """
        return self._run(
            self._jobs_of().chats(messages, sampling_params, n, lora_request, streamed=False), progress
        )

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        n: int = 1,
        lora_request: AdapterChoice = None,
    ) -> Generator[CompletionDelta]:
        """Like `generate`, but yields a delta of each completion at every step.

        The engine runs while this iterator is advanced, or another thread waits for outputs. Leaving the loop cancels
        the requests.

        Raises:
            InvalidParameter: a prompt or parameter is invalid; raised by the call, before the first delta.
        """
        return self._stream(
            self._jobs_of().completions(prompts, sampling_params, n, lora_request, streamed=True)
        )

    def stream_chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        n: int = 1,
        lora_request: AdapterChoice = None,
    ) -> Generator[CompletionDelta]:
        """Like `chat`, but yields a delta of each completion at every step."""
        return self._stream(self._jobs_of().chats(messages, sampling_params, n, lora_request, streamed=True))

    def embed(
        self,
        inputs: Prompt | Sequence[Prompt],
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        prompt_name: str | None = None,
        truncate_prompt_tokens: int | None = None,
        progress: bool = True,
    ) -> list[EmbeddingOutput]:
        """Convert each input (text, or token ids) to a vector, by ``embedding_model`` or a MODEL for embeddings.

        Args:
            inputs: one input or several.
            dimensions: truncate each vector to this many numbers, for models that are trained for it.
            normalize: whether vectors are scaled to length 1 (default: as in the model's files).
            prompt_name: name of the model's prompt to put before each text.
            truncate_prompt_tokens: cut longer inputs to this many tokens; -1: to the model's limit.
            progress: show a progress bar on a terminal.

        Raises:
            ConfigError: there is no embedding model.
            InvalidParameter: an input or parameter is invalid; nothing was computed.
        """
        self._require_open()
        given = each_prompt(inputs, "inputs")
        with progress_bar(len(given), progress, "embedding") as advance:
            task = embedding_task(
                self._pooling,
                given,
                dimensions=dimensions,
                normalize=normalize,
                prompt_name=prompt_name,
                truncate=truncate_prompt_tokens,
            )
            return compute(task, self._turn, advance)

    def score(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        *,
        truncate_prompt_tokens: int | None = None,
        progress: bool = True,
    ) -> list[ScoreOutput]:
        """Score one query with each document, or each query with its document, by ``rerank_model``.

        Without a cross-encoder, the score is the cosine similarity of the embeddings.

        Raises:
            ConfigError: there is no model for it.
            InvalidParameter: a text or parameter is invalid; nothing was computed.
        """
        self._require_open()
        pairs = pairs_of(queries, documents)
        with progress_bar(len(pairs), progress, "scoring") as advance:
            return compute(score_task(self._pooling, pairs, truncate_prompt_tokens), self._turn, advance)

    def _jobs_of(self) -> JobMaker:
        """The `JobMaker` of the model.

        Raises:
            RuntimeError: this is a model for embeddings or scores only, or closed, or of another process.
        """
        self._require_open()
        assert self.loaded
        return self._make

    def _run(self, job: Job, progress: bool) -> list[RequestOutput]:
        with interrupts_between_steps() as raise_deferred:
            try:
                self._submit(job)
                with progress_bar(len(job.requests), progress) as advance:
                    while job.open or job.has_news():
                        self._wait(job, raise_deferred)
                        for event in job.ended():
                            self._make.learn(job, event)
                            advance(job.num_tokens(event.request_id))
            finally:  # the engine is used again, so no request may stay in it after an interrupt or a failed step
                self._shared.abandon(job)
        return job.outputs

    def _stream(self, job: Job) -> Generator[CompletionDelta]:
        try:
            self._submit(job)
            while job.open or job.has_news():
                with interrupts_between_steps() as raise_deferred:
                    self._wait(job, raise_deferred)
                yield from job.deltas()
                for event in job.ended():
                    self._make.learn(job, event)
        finally:
            self._shared.abandon(job)

    def _submit(self, job: Job) -> None:
        self._require_open()
        self._shared.submit(job)

    def _wait(self, job: Job, raise_deferred: Callable[[], None]) -> None:
        self._shared.run_until_news(job, raise_deferred)
        if not job.has_news():
            self._require_open()

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """A time in which no other thread computes."""
        with self._turns.once():
            self._require_not_closed()
            yield

    def _require_open(self) -> None:
        self._turns.require_caller()
        self._require_not_closed()

    def _require_not_closed(self) -> None:
        if self._closed:
            raise RuntimeError("this LLM is closed")
