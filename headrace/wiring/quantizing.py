"""Quantized checkpoints: writes one from a plain model, and measures the quality of each scheme and method."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

from headrace.compute.checkpoint import ModelError
from headrace.compute.device import device_facts, limit_threads, resolve_device, resolve_dtype
from headrace.compute.kernels import select
from headrace.compute.model.hub import read_config, resolve_folder
from headrace.compute.model.weights import DecoderWeights, load_weights, read_spec
from headrace.compute.quantization.scheme import WRITTEN
from headrace.compute.quantizing import (
    Calibration,
    Method,
    Quality,
    Reader,
    compare,
    split_windows,
    write_quantized,
)
from headrace.config import ConfigError
from headrace.core.request import SamplingParams
from headrace.llm import LLM
from headrace.text.tokenizer import Tokenizer, TokenizerError

WINDOW = 512
"""Maximum tokens of a window; windows are processed independently."""
WINDOWS = 160
"""Maximum number of windows of a text; one in `HELD_OUT` is used only for measuring."""
HELD_OUT = 5
LEAST_TOKENS = 1000
"""Minimum number of tokens to measure on: with fewer, the result is noise."""

_PIECE = 1 << 20
"""Characters of a file that are encoded at once; each needs a few hundred bytes of memory."""

REPORTED: tuple[tuple[str, Method], ...] = (
    ("int8", "rtn"),
    ("int4", "rtn"),
    ("int4", "gptq"),
    ("int4", "awq"),
    ("w4a8", "gptq"),
)


class Line(NamedTuple):
    """One scheme and method with its size and quality."""

    name: str
    weight_bytes: int
    quality: Quality


@contextmanager
def _refusals() -> Iterator[None]:
    """Turns errors of models, tokenizers and disks into one-line errors."""
    try:
        yield
    except OSError as error:
        named = f"{error.filename}: " if error.filename else ""
        raise ConfigError(f"{named}{(error.strerror or str(error)).lower()}") from error
    except (ModelError, TokenizerError) as error:
        raise ConfigError(str(error)) from error


class Quantizing:
    """One plain model, and the text for calibrating and measuring its quantized versions.

    ``measured`` and ``calibrated`` are disjoint sets of windows of tokens. ``scored`` is the number of predicted tokens
    in ``measured``: all but the first of each window.

    Args:
        model: folder, Hugging Face name or "builtin".
        text: file for calibration and measurement; None: the model generates a text.
        seed: the seed of the generated text.

    Raises:
        ConfigError: there is no such model, it cannot be quantized, or there is too little text.
    """

    @_refusals()
    def __init__(self, model: str, text: Path | None = None, seed: int = 0) -> None:
        self.folder = resolve_folder(model)
        self.config = read_config(self.folder)
        self.spec = read_spec(self.folder)
        if self.spec.stored:
            raise ConfigError(f"{model}: its weights are already quantized ({self.spec.stored.name})")
        if self.spec.nested_checkpoint:
            raise ConfigError(f"{model} is part of a larger model; only text models can be quantized")
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
                f"--calibrate {text}: the file has too little text"
                if text
                else "the model generates too little text: set a text with --calibrate FILE"
            )
        self.measured = windows[::HELD_OUT]
        self.calibrated = [window for place, window in enumerate(windows) if place % HELD_OUT]
        self.scored = sum(len(window) - 1 for window in self.measured)

    def write(
        self, scheme: str, method: Method, target: Path, calibration: Calibration | None = None
    ) -> None:
        """Write the model to the new folder ``target``.

        ``calibration`` is the result of `calibration`, if several models share it.

        Raises:
            ModelError, OSError: as `write_quantized`.
        """
        calibration = calibration or self.calibration()
        write_quantized(self.folder, target, self.config, self.spec, WRITTEN[scheme], method, calibration)

    def calibration(self) -> Calibration:
        """Statistics of the plain model's layers, collected on first use."""
        return Calibration(self.spec, self._plain, self.calibrated)

    def measure(self, folder: Path, name: str) -> Line:
        """Size and quality of a quantized checkpoint, compared with the plain model."""
        return self._line(name, self._reader(self._plain()), self._stored(folder))

    @property
    def report_lines(self) -> int:
        """The number of lines of `report`."""
        return len(WRITTEN) + 1 + len(REPORTED)

    def report(self) -> Iterator[Line]:
        """All schemes and methods, each as soon as it is measured.

        Raises:
            ConfigError: the model's weights cannot be read, or there is no disk space for the quantized ones.
        """
        with _refusals():
            plain = self._reader(self._plain())
            for scheme in WRITTEN:
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
        return load_weights(folder, read_spec(folder), self.dtype, self.device)

    def _reader(self, weights: DecoderWeights, kv_dtype: torch.dtype | None = None) -> Reader:
        longest = max(map(len, self.measured))
        return Reader(self.spec, weights, select("auto", self.device, dtype=self.dtype), longest, kv_dtype)

    def _line(
        self, name: str, plain: Reader, weights: DecoderWeights, kv_dtype: torch.dtype | None = None
    ) -> Line:
        return Line(name, weights.nbytes, compare(plain, self._reader(weights, kv_dtype), self.measured))

    def _read(self, text: Path, length: int) -> list[Sequence[int]]:
        """A file in windows that begin with the model's start token; a short file gives shorter windows."""
        tokenizer = Tokenizer.from_folder(self.folder)
        bos = tokenizer.bos_token_id
        begin = [] if bos is None or tokenizer.encode("")[:1] != [bos] else [bos]
        tokens: list[int] = []
        try:
            with text.open(encoding="utf-8") as file:
                # Read no more than needed, and cut at the end of a line if there is one.
                while len(tokens) < WINDOWS * length and (piece := file.read(_PIECE) + file.readline(_PIECE)):
                    tokens += tokenizer.encode(piece, add_special_tokens=False)
        except OSError as error:
            raise ConfigError(f"--calibrate {text}: {(error.strerror or str(error)).lower()}") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"--calibrate {text}: the file is not UTF-8 text") from error
        if max(tokens, default=0) >= self.spec.vocab_size:
            raise ConfigError(f"{self.folder}: its tokenizer has tokens that the model does not have")
        length = max(1, min(length - len(begin), len(tokens) // HELD_OUT))
        return [[*begin, *window] for window in split_windows(tokens, length)[:WINDOWS]]

    def _write_text(self, length: int, seed: int) -> list[Sequence[int]]:
        """Text that the model generates at temperature 1."""
        begin = self.config.get("bos_token_id")
        if not isinstance(begin, int):
            begin = Tokenizer.from_folder(self.folder).bos_token_id
        if begin is None:
            raise ConfigError(
                "the model has no start token to generate a text from: set a text with --calibrate FILE"
            )
        llm = LLM(str(self.folder), max_model_len=length)
        try:
            asked = [
                SamplingParams(temperature=1.0, max_tokens=length - 1, seed=seed + place)
                for place in range(WINDOWS)
            ]
            generated = llm.generate([[begin]] * WINDOWS, asked, progress=False)
        finally:
            llm.close()
        return [[begin, *each.outputs[0].token_ids] for each in generated]


@_refusals()
def check_output(target: Path) -> None:
    """Checks an output folder before the work begins.

    Raises:
        ConfigError: ``target`` exists already, or cannot be created.
    """
    if os.path.lexists(target):
        raise ConfigError(f"--output {target}: the folder exists already")
    parent = next(folder for folder in target.absolute().parents if folder.exists())
    if not (parent.is_dir() and os.access(parent, os.W_OK | os.X_OK)):
        raise ConfigError(f"--output {target}: {parent} is not a folder that can be written to")


@_refusals()
def quantize(
    job: Quantizing, scheme: str, method: Method, target: Path, *, force: bool, show: Callable[[Line], None]
) -> None:
    """Write a quantized model, measure it, and keep it if it is within the quality limits.

    Raises:
        ConfigError: the model or ``target`` cannot be written; or, without ``force``, the text is too short or
            the model exceeds a quality limit.
    """
    unless = "nothing is written (--force writes it anyway)"
    if job.scored < LEAST_TOKENS and not force:
        raise ConfigError(
            f"{job.scored:,} tokens are too few to measure a model; at least {LEAST_TOKENS:,} are needed: {unless}"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    # Named before it is made: a signal may end this between the two, and what it interrupts must be removed.
    folder = target.parent / f".{target.name}.{secrets.token_hex(4)}.unproved"
    try:
        folder.mkdir(mode=0o700)
        unproved = folder / "model"  # only the owner can read the folder around it
        job.write(scheme, method, unproved)
        line = job.measure(unproved, f"{scheme} {method}")
        show(line)
        faults = line.quality.faults()
        if faults and not force:
            raise ConfigError(f"{'; '.join(faults)}: {unless}")
        unproved.rename(target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
