"""A quantized checkpoint from a plain one, and what any way to spend fewer bits costs: texts, readers, files."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

from headrace.compute.device import device_facts, limit_threads, resolve_device, resolve_dtype
from headrace.compute.kernels import select
from headrace.compute.model.families import parse_config
from headrace.compute.model.hub import read_config, resolve_folder
from headrace.compute.model.reading import Reader
from headrace.compute.model.spec import ModelError
from headrace.compute.model.weights import DecoderWeights, load_weights
from headrace.compute.quantization.calibration import Calibration, split_windows
from headrace.compute.quantization.quality import Quality, compare
from headrace.compute.quantization.scheme import SCHEMES
from headrace.compute.quantization.writing import Method, write_quantized
from headrace.config import ConfigError
from headrace.core.request import SamplingParams
from headrace.llm import LLM
from headrace.serve.text.tokenizer import Tokenizer, TokenizerError

WINDOW = 512
"""Tokens that are read at once, at most; every window begins anew."""
WINDOWS = 160
"""Of a text, at most; one in `HELD_OUT` is kept for measuring."""
HELD_OUT = 5
LEAST_TOKENS = 1000
"""That a model must be measured on before it is kept: on fewer, chance would decide."""

_PIECE = 1 << 20
"""Characters of a file that are encoded at once: each takes some hundred bytes of memory."""

REPORTED: tuple[tuple[str, Method], ...] = (
    ("int8", "rtn"),
    ("int4", "rtn"),
    ("int4", "gptq"),
    ("int4", "awq"),
    ("w4a8", "gptq"),
)


class Line(NamedTuple):
    """One way to spend fewer bits, and what it costs."""

    name: str
    weight_bytes: int
    quality: Quality


@contextmanager
def _refusals() -> Iterator[None]:
    """What is wrong with a model, its tokenizer or a disk is told as a wrong setting is: in one line."""
    try:
        yield
    except (ModelError, TokenizerError, OSError) as error:
        raise ConfigError(str(error)) from error


class Quantizing:
    """One plain model, and the text by which its quantizations are made and measured.

    ``measured`` and ``calibrated`` are windows of tokens, none of them in both; ``scored`` counts the tokens that are
    predicted in measuring, which are all but the first of each window.

    Args:
        model: folder, hub name or "builtin".
        text: file to calibrate on and to measure by; None: the model writes one itself.
        seed: of what it writes.

    Raises:
        ConfigError: there is no such model, it cannot be quantized, or there is no text.
    """

    @_refusals()
    def __init__(self, model: str, text: Path | None = None, seed: int = 0) -> None:
        self.folder = resolve_folder(model)
        self.config = read_config(self.folder)
        self.spec = parse_config(self.config)
        if self.spec.stored:
            raise ConfigError(f"{model}: its weights are in few bits already ({self.spec.stored.name})")
        if self.spec.nested_checkpoint:
            raise ConfigError(f"{model}: is part of a larger model; only text models can be quantized")
        limit_threads()
        self.device = resolve_device("auto")
        facts = device_facts(self.device)
        self.plain_dtype = resolve_dtype("auto", self.spec.dtype, facts).dtype
        self.dtype = resolve_dtype("auto", self.spec.dtype, facts, quantized=True).dtype
        length = min(WINDOW, self.spec.max_positions)
        windows = self._read(text, length) if text else self._write_text(length, seed)
        windows = [window for window in windows if len(window) > 1]
        if len(windows) < HELD_OUT:
            raise ConfigError(
                f"--calibrate {text}: there is too little text in it"
                if text
                else "the model writes next to nothing: give a text with --calibrate FILE"
            )
        self.measured = windows[::HELD_OUT]
        self.calibrated = [window for place, window in enumerate(windows) if place % HELD_OUT]
        self.scored = sum(len(window) - 1 for window in self.measured)

    def write(
        self, scheme: str, method: Method, target: Path, calibration: Calibration | None = None
    ) -> None:
        """Write the model to the folder ``target``, which is made.

        ``calibration`` is `calibration`'s, where several models are to share it.

        Raises:
            ModelError, OSError: as `write_quantized`.
        """
        calibration = calibration or self.calibration()
        write_quantized(self.folder, target, self.config, self.spec, SCHEMES[scheme], method, calibration)

    def calibration(self) -> Calibration:
        """The moments of the plain model's layers, taken when they are first asked for."""
        return Calibration(self.spec, self._plain, self.calibrated)

    def measure(self, folder: Path, name: str) -> Line:
        """What a quantized checkpoint costs against the plain one."""
        return self._line(name, self._reader(self._plain()), self._stored(folder))

    def report(self) -> Iterator[Line]:
        """Every way that there is, each as soon as it has been measured.

        Raises:
            ConfigError: the model's weights cannot be read, or there is no room for those in fewer bits.
        """
        with _refusals():
            plain = self._reader(self._plain())
            for scheme in SCHEMES:
                weights = load_weights(self.folder, self.spec, self.dtype, self.device, scheme)
                yield self._line(f"--quantization {scheme}", plain, weights)
            yield self._line("--kv-cache-dtype int8", plain, self._plain(), torch.int8)
            calibration = self.calibration()
            for scheme, method in REPORTED:
                with tempfile.TemporaryDirectory() as folder:
                    target = Path(folder) / "quantized"
                    self.write(scheme, method, target, calibration)
                    yield self._line(f"written {scheme} {method}", plain, self._stored(target))

    def _plain(self) -> DecoderWeights:
        return load_weights(self.folder, self.spec, self.plain_dtype, self.device)

    def _stored(self, folder: Path) -> DecoderWeights:
        return load_weights(folder, parse_config(read_config(folder)), self.dtype, self.device)

    def _reader(self, weights: DecoderWeights, kv_dtype: torch.dtype | None = None) -> Reader:
        longest = max(map(len, self.measured))
        return Reader(self.spec, weights, select("auto", self.device), longest, kv_dtype)

    def _line(
        self, name: str, plain: Reader, weights: DecoderWeights, kv_dtype: torch.dtype | None = None
    ) -> Line:
        return Line(name, weights.nbytes, compare(plain, self._reader(weights, kv_dtype), self.measured))

    def _read(self, text: Path, length: int) -> list[Sequence[int]]:
        """A file in windows that begin as the model's texts do; a short one in shorter windows, `HELD_OUT` or more."""
        tokenizer = Tokenizer.from_folder(self.folder)
        bos = tokenizer.bos_token_id
        begin = [] if bos is None or tokenizer.encode("")[:1] != [bos] else [bos]
        tokens: list[int] = []
        try:
            with text.open(encoding="utf-8") as file:
                # No further than is needed, and cut where a line ends, if one does.
                while len(tokens) < WINDOWS * length and (piece := file.read(_PIECE) + file.readline(_PIECE)):
                    tokens += tokenizer.encode(piece, add_special_tokens=False)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--calibrate {text}: {error}") from error
        if max(tokens, default=0) >= self.spec.vocab_size:
            raise ConfigError(f"{self.folder}: its tokenizer knows tokens that the model does not")
        length = max(1, min(length - len(begin), len(tokens) // HELD_OUT))
        return [[*begin, *window] for window in split_windows(tokens, length)[:WINDOWS]]

    def _write_text(self, length: int, seed: int) -> list[Sequence[int]]:
        """What the model says of itself, at temperature 1: the text that it knows best."""
        begin = self.config.get("bos_token_id")
        if not isinstance(begin, int):
            begin = Tokenizer.from_folder(self.folder).bos_token_id
        if begin is None:
            raise ConfigError("the model has no token that begins a text: give one with --calibrate FILE")
        llm = LLM(str(self.folder), max_model_len=length)
        try:
            asked = [
                SamplingParams(temperature=1.0, max_tokens=length - 1, seed=seed + place)
                for place in range(WINDOWS)
            ]
            told = llm.generate([[begin]] * WINDOWS, asked, progress=False)
        finally:
            llm.close()
        return [[begin, *each.outputs[0].token_ids] for each in told]


@_refusals()
def check_output(target: Path) -> None:
    """What can be said of a folder to be written before the work begins.

    Raises:
        ConfigError: ``target`` is there already, or cannot be made.
    """
    if os.path.lexists(target):
        raise ConfigError(f"--output {target}: is there already")
    parent = next(folder for folder in target.absolute().parents if folder.exists())
    if not (parent.is_dir() and os.access(parent, os.W_OK | os.X_OK)):
        raise ConfigError(f"--output {target}: {parent} is not a folder that can be written to")


@_refusals()
def quantize(
    job: Quantizing, scheme: str, method: Method, target: Path, *, force: bool, show: Callable[[Line], None]
) -> None:
    """Write a quantized model, measure what was written, and keep it if it is good enough.

    Raises:
        ConfigError: the model or ``target`` cannot be written; or the text is too short, or the model past a bound of
            quality, and ``force`` is not set.
    """
    unless = "nothing is written (--force writes it all the same)"
    if job.scored < LEAST_TOKENS and not force:
        raise ConfigError(
            f"{job.scored:,} tokens are too few to measure a model by, less than {LEAST_TOKENS:,}: {unless}"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        prefix=f".{target.name}.", suffix=".unproved", dir=target.parent
    ) as folder:
        unproved = Path(folder) / "model"  # the folder around it is for its owner alone
        job.write(scheme, method, unproved)
        line = job.measure(unproved, f"{scheme} {method}")
        show(line)
        faults = line.quality.faults()
        if faults and not force:
            raise ConfigError(f"{'; '.join(faults)}: {unless}")
        unproved.rename(target)
