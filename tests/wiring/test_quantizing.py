"""Which text a quantization is made and measured by, what is refused before any of it, and what a failure leaves."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from headrace.compute import quantizing as writing
from headrace.compute.device import device_facts
from headrace.compute.model.hub import resolve_folder
from headrace.config import ConfigError
from headrace.text.tokenizer import Tokenizer
from headrace.wiring import quantizing
from headrace.wiring.quantizing import LEAST_TOKENS, Line, Quantizing, check_output, quantize

BUILTIN = resolve_folder("builtin")
STORY = "Once upon a time there was a fox who lived by the river. One day it rained.\n"
BOS = 1

Change = Callable[[dict[str, Tensor]], None]


def text(folder: Path, times: int = 40) -> Path:
    file = folder / "text"
    file.write_text(STORY * times)
    return file


def variant(folder: Path, change: Change | None = None, **config: object) -> Path:
    """The built-in model with other tensors and another config."""
    shutil.copytree(BUILTIN, folder)
    reported = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(reported))
    tensors = load_file(folder / "model.safetensors")
    if change:
        change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def write(job: Quantizing, target: Path, method: writing.Method = "rtn", *, force: bool = True) -> list[Line]:
    shown: list[Line] = []
    quantize(job, "int4", method, target, force=force, show=shown.append)
    return shown


@pytest.mark.parametrize("times", [1, 4, 40])
def test_what_is_measured_has_not_been_seen_however_short_the_text(tmp_path: Path, times: int) -> None:
    job = Quantizing("builtin", text(tmp_path, times))
    assert len(job.measured) == 1
    assert 4 <= len(job.calibrated) < 10
    tokens = Tokenizer.from_folder(BUILTIN).encode(STORY * times, add_special_tokens=False)
    used = [token for window in job.measured + job.calibrated for token in window if token != BOS]
    assert used == tokens[: len(used)]
    assert len(tokens) - len(used) < len(job.measured[0])
    assert job.scored == len(job.measured[0]) - 1


def test_a_measure_of_few_tokens_keeps_no_model_unless_forced(tmp_path: Path) -> None:
    job = Quantizing("builtin", text(tmp_path))
    assert 100 < job.scored < LEAST_TOKENS
    with pytest.raises(ConfigError, match=rf"{job.scored} tokens are too few .* 1,000.* \(--force"):
        write(job, tmp_path / "few", force=False)
    assert not (tmp_path / "few").exists()
    (line,) = write(job, tmp_path / "few")
    assert line.quality.tokens == job.scored
    assert (tmp_path / "few").is_dir()


def test_a_model_that_ends_at_once_is_measured_on_nothing(tmp_path: Path) -> None:
    ends = variant(tmp_path / "ends")
    (ends / "generation_config.json").write_text(json.dumps({"eos_token_id": list(range(4096))}))
    job = Quantizing(str(ends))
    with pytest.raises(ConfigError, match="are too few"):
        write(job, tmp_path / "few", force=False)


@pytest.mark.parametrize("words", ["", "Once"])
def test_there_must_be_something_to_read(tmp_path: Path, words: str) -> None:
    (tmp_path / "text").write_text(words)
    with pytest.raises(ConfigError, match="the file has too little text"):
        Quantizing("builtin", tmp_path / "text")


def test_windows_of_a_file_begin_as_the_model_s_own_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantizing, "WINDOW", 32)
    job = Quantizing("builtin", text(tmp_path))
    windows = job.measured + job.calibrated
    assert {len(window) for window in windows} == {32}
    assert {window[0] for window in windows} == {BOS}
    bare = variant(tmp_path / "bare")
    tokenizer = json.loads((bare / "tokenizer.json").read_text()) | {"post_processor": None}
    (bare / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = json.loads((bare / "tokenizer_config.json").read_text()) | {"add_bos_token": False}
    (bare / "tokenizer_config.json").write_text(json.dumps(config))
    assert all(BOS not in window for window in Quantizing(str(bare), text(tmp_path)).measured)


def test_the_token_that_begins_a_text_may_be_known_to_the_tokenizer_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantizing, "WINDOW", 16)
    monkeypatch.setattr(quantizing, "WINDOWS", 10)
    job = Quantizing(str(variant(tmp_path / "model", bos_token_id=None)))
    assert {window[0] for window in job.measured} == {BOS}


def test_a_large_file_is_read_as_far_as_it_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantizing, "WINDOW", 32)
    monkeypatch.setattr(quantizing, "WINDOWS", 10)
    monkeypatch.setattr(quantizing, "_PIECE", 500)
    encoded: list[str] = []
    encode = Tokenizer.encode

    def watched(self: Tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
        encoded.append(text)
        return encode(self, text, add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode", watched)
    job = Quantizing("builtin", text(tmp_path, times=1000))
    assert len(job.measured + job.calibrated) == 10
    pieces = [piece for piece in encoded if piece]
    assert 1 < len(pieces) < 5
    assert all(500 <= len(piece) <= 1000 and piece.endswith(".\n") for piece in pieces)
    (tmp_path / "text").write_text("a fox " * 10_000)  # nowhere a line ends
    encoded.clear()
    Quantizing("builtin", tmp_path / "text")
    assert max(map(len, encoded)) == 1000


def test_the_plain_model_is_computed_as_a_server_computes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = replace(device_facts(torch.device("cpu")), native_bfloat16=True)
    monkeypatch.setattr(quantizing, "device_facts", lambda _: facts)
    monkeypatch.setattr(quantizing, "resolve_device", lambda _: torch.device("cpu"))
    job = Quantizing(str(variant(tmp_path / "model", torch_dtype="float16")), text(tmp_path))
    assert job._plain().dtype == torch.float32
    assert next(job.report()).quality.agreement > 0.9
    job.write("int8", "rtn", tmp_path / "few")
    assert job._stored(tmp_path / "few").dtype == torch.bfloat16


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    check_output(tmp_path / "new" / "few")
    assert not (tmp_path / "new").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file is not a folder that can be written to"):
        check_output(tmp_path / "file" / "few")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for there in ("file", "link"):
        with pytest.raises(ConfigError, match="the folder exists already"):
            check_output(tmp_path / there)


def test_two_runs_with_one_target_leave_each_other_alone(tmp_path: Path) -> None:
    job = Quantizing("builtin", text(tmp_path, times=1))
    inner: list[Line] = []

    def another(_: Line) -> None:
        quantize(job, "int4", "rtn", tmp_path / "few", force=True, show=inner.append)

    with pytest.raises(ConfigError, match="few"):
        quantize(job, "int8", "rtn", tmp_path / "few", force=True, show=another)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["few", "text"]
    assert job.measure(tmp_path / "few", "again").weight_bytes == inner[0].weight_bytes


def broken(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = float("nan")


def endless(tensors: dict[str, Tensor]) -> None:
    tensors["model.embed_tokens.weight"][:] = float("inf")


def lacking(tensors: dict[str, Tensor]) -> None:
    del tensors["model.layers.1.mlp.up_proj.weight"]


def biased(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.1.mlp.up_proj.bias"] = torch.ones(768)


def odd(tensors: dict[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if "mlp" in name:
            tensors[name] = (tensor[:, :767] if "down" in name else tensor[:767]).contiguous()


@pytest.mark.parametrize(
    ("method", "change", "message"),
    [
        ("rtn", broken, r"weights of .*layers\.1\.mlp\.up_proj .*not finite"),
        ("gptq", broken, r"weights of .*layers\.1\.mlp\.up_proj .*not finite"),
        ("gptq", endless, r"inputs of .*layers\.0\.self_attn\.q_proj.* not finite"),
        ("rtn", lacking, r"lacks model\.layers\.1\.mlp\.up_proj\.weight"),
        ("rtn", biased, r"does not use: model\.layers\.1\.mlp\.up_proj\.bias"),
    ],
)
def test_a_model_that_cannot_be_written_is_refused_by_name(
    tmp_path: Path, method: writing.Method, change: Change, message: str
) -> None:
    job = Quantizing(str(variant(tmp_path / "model", change)), text(tmp_path, times=1))
    with pytest.raises(ConfigError, match=message):
        write(job, tmp_path / "few", method)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "text"]


@pytest.mark.parametrize("method", ["rtn", "gptq", "awq"])
def test_halves_of_bytes_need_even_widths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: writing.Method
) -> None:
    job = Quantizing(str(variant(tmp_path / "model", odd, intermediate_size=767)), text(tmp_path))
    monkeypatch.setattr(writing.Calibration, "of", None)  # it is not calibrated first
    with pytest.raises(ConfigError, match="4 bits need an even number of inputs, got 767"):
        write(job, tmp_path / "few", method)


def test_a_report_of_a_broken_model_is_refused_by_name(tmp_path: Path) -> None:
    job = Quantizing(str(variant(tmp_path / "model", lacking)), text(tmp_path))
    with pytest.raises(ConfigError, match="lacks"):
        next(job.report())


def test_part_of_a_larger_model_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    inner = json.loads((BUILTIN / "config.json").read_text())
    text_config = inner | {"model_type": "gemma3_text", "layer_types": ["full_attention"] * 3}
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text_config})
    )
    with pytest.raises(ConfigError, match="only text models"):
        Quantizing(str(tmp_path))


def test_without_a_tokenizer_there_is_no_text(tmp_path: Path) -> None:
    model = variant(tmp_path / "model")
    (model / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match="contains no tokenizer"):
        Quantizing(str(model), text(tmp_path))


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    model = variant(tmp_path / "model", vocab_size=300)
    with pytest.raises(ConfigError, match="tokens that the model does not"):
        Quantizing(str(model), text(tmp_path))


def test_a_full_disk_is_an_error_and_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise SafetensorError("No space left on device")

    job = Quantizing("builtin", text(tmp_path))
    monkeypatch.setattr(writing, "save_file", full)
    with pytest.raises(ConfigError, match=r"^/\S*model-00001\.safetensors: no space left on device"):
        write(job, tmp_path / "few")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["text"]


def test_a_report_reads_the_text_for_calibration_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readings: list[object] = []
    moments = writing.input_moments
    monkeypatch.setattr(writing, "input_moments", lambda *asked: readings.append(asked) or moments(*asked))
    job = Quantizing("builtin-draft", text(tmp_path, times=1))
    assert len(list(job.report())) == 4 + len(quantizing.REPORTED)
    assert len(readings) == 1
