"""A quantized checkpoint from a plain one, and what any way to spend fewer bits costs: texts, readers, files."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
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
from headrace.serve.text.tokenizer import Tokenizer

WINDOW = 512
"""Tokens that are read at once; every window begins anew."""
WINDOWS = 160
"""Of a text, at most; one in `HELD_OUT` is kept for measuring."""
HELD_OUT = 5

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


class Quantizing:
    """One plain model, and the text by which its quantizations are made and measured.

    Args:
        model: folder, hub name or "builtin".
        text: file to calibrate on and to measure by; None: the model writes one itself.
        seed: of what it writes.

    Raises:
        ConfigError: there is no such model, its weights are in few bits already, or there is no text.
    """

    def __init__(self, model: str, text: Path | None = None, seed: int = 0) -> None:
        try:
            self.folder = resolve_folder(model)
            self.config = read_config(self.folder)
            self.spec = parse_config(self.config)
        except ModelError as error:
            raise ConfigError(str(error)) from error
        if self.spec.stored:
            raise ConfigError(f"{model}: its weights are in few bits already ({self.spec.stored.name})")
        limit_threads()
        self.device = resolve_device("auto")
        facts = device_facts(self.device)
        self.dtype = resolve_dtype("auto", self.spec.dtype, facts, quantized=True).dtype
        length = min(WINDOW, self.spec.max_positions)
        windows = self._read(text, length) if text else self._write_text(length, seed)
        self.measured = windows[::HELD_OUT]
        self.calibrated = [w for place, w in enumerate(windows) if place % HELD_OUT] or windows

    def write(self, scheme: str, method: Method, target: Path) -> None:
        """Write the model to the folder ``target``, which is made."""
        calibration = None
        if method != "rtn":
            calibration = Calibration(self.spec, self._plain, self.calibrated)
        try:
            write_quantized(self.folder, target, self.config, self.spec, SCHEMES[scheme], method, calibration)
        except (ModelError, OSError) as error:
            raise ConfigError(str(error)) from error

    def measure(self, folder: Path, name: str) -> Line:
        """What a quantized checkpoint costs against the plain one."""
        return self._line(name, self._reader(self._plain()), self._stored(folder))

    def report(self) -> Iterator[Line]:
        """Every way that there is, each as soon as it has been measured."""
        plain = self._reader(self._plain())
        for scheme in SCHEMES:
            weights = load_weights(self.folder, self.spec, self.dtype, self.device, scheme)
            yield self._line(f"--quantization {scheme}", plain, weights)
        yield self._line("--kv-cache-dtype int8", plain, self._plain(), torch.int8)
        for scheme, method in REPORTED:
            with tempfile.TemporaryDirectory() as folder:
                target = Path(folder) / "quantized"
                self.write(scheme, method, target)
                yield self._line(f"written {scheme} {method}", plain, self._stored(target))

    def _plain(self) -> DecoderWeights:
        return load_weights(self.folder, self.spec, self.dtype, self.device)

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
        try:
            tokens = Tokenizer.from_folder(self.folder).encode(text.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--calibrate {text}: {error}") from error
        if len(tokens) < 2:
            raise ConfigError(f"--calibrate {text}: there is no text in it")
        return split_windows(tokens, length)[:WINDOWS]

    def _write_text(self, length: int, seed: int) -> list[Sequence[int]]:
        """What the model says of itself, at temperature 1: the text that it knows best."""
        begin = self.config.get("bos_token_id")
        if not isinstance(begin, int):
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
        windows = [[begin, *each.outputs[0].token_ids] for each in told]
        return [window for window in windows if len(window) > 1]


def quantize(
    job: Quantizing, scheme: str, method: Method, target: Path, *, force: bool, show: Callable[[Line], None]
) -> None:
    """Write a quantized model, measure what was written, and keep it if it is good enough.

    Raises:
        ConfigError: ``target`` is there already, or the model is past a bound of quality and ``force`` is not set.
    """
    if target.exists():
        raise ConfigError(f"--output {target}: is there already")
    unproved = target.with_name(f".{target.name}.unproved")
    shutil.rmtree(unproved, ignore_errors=True)
    try:
        job.write(scheme, method, unproved)
        line = job.measure(unproved, f"{scheme} {method}")
        show(line)
        faults = line.quality.faults()
        if faults and not force:
            raise ConfigError(f"{'; '.join(faults)}: nothing is written (--force writes it all the same)")
        unproved.rename(target)
    finally:
        shutil.rmtree(unproved, ignore_errors=True)
