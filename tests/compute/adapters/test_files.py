"""Adapters as PEFT writes them: what is read, and what is refused by its name."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from headrace.compute.adapters.files import read_adapter
from headrace.compute.adapters.layout import AdapterLayout, Fused, Module
from headrace.core.adapters import AdapterError, AdapterMissing
from tests.doubles.adapters import changes_of, config_of, write_adapter, write_files

SIZES = {
    "q_proj": (12, 8),
    "k_proj": (4, 8),
    "v_proj": (4, 8),
    "o_proj": (8, 12),
    "gate_proj": (10, 8),
    "up_proj": (10, 8),
    "down_proj": (8, 10),
}
PLACES = {
    "q_proj": ("qkv", 0),
    "k_proj": ("qkv", 12),
    "v_proj": ("qkv", 16),
    "o_proj": ("output", 0),
    "gate_proj": ("gate_up", 0),
    "up_proj": ("gate_up", 10),
    "down_proj": ("down", 0),
}


def module(name: str, layer: int) -> str:
    part = "self_attn" if name in ("q_proj", "k_proj", "v_proj", "o_proj") else "mlp"
    return f"model.layers.{layer}.{part}.{name}"


MODULES = {module(name, layer): (name, layer) for layer in range(2) for name in SIZES}
LAYOUT = AdapterLayout(
    {full: Module(layer, *PLACES[name], *SIZES[name], None) for full, (name, layer) in MODULES.items()},
    2,
    "TinyForCausalLM",
)
ALL = {full: SIZES[name] for full, (name, _) in MODULES.items()}


def read(folder: Path, max_rank: int = 16) -> Any:
    return read_adapter(folder, LAYOUT, torch.float32, max_rank)


def added(folder: Path) -> dict[str, Tensor]:
    """What the adapter adds to each linear layer, as one matrix."""
    found = {}
    for index, layer in enumerate(read(folder).layers):
        for name, (down, parts) in layer.items():
            begin = 0
            for at, up in parts:
                rank = up.shape[1]
                found[f"{index} {name} {at}"] = up.double() @ down[begin : begin + rank].double()
                begin += rank
    return found


PATTERNS = {
    "rank_pattern": {"k_proj": 2, r"layers\.1\..*\.up_proj": 6},
    "alpha_pattern": {"layers.1.mlp.up_proj": 3},
}


@pytest.mark.parametrize("changed", [{}, {"use_rslora": True}, PATTERNS, PATTERNS | {"use_rslora": True}])
def test_every_module_is_changed_by_the_scaled_product(changed: dict[str, Any], tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", ALL, **changed)
    expected = {}
    for full, change in changes_of(folder).items():
        name, layer = MODULES[full]
        place, at = PLACES[name]
        expected[f"{layer} {place} {at}"] = change
    found = added(folder)
    assert found.keys() == expected.keys()
    for name, change in expected.items():
        torch.testing.assert_close(found[name], change, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "changed",
    [
        {"target_modules": ["q_proj", "self_attn.v_proj"]},
        {"target_modules": r".*\.(q_proj|v_proj)"},
        {"target_modules": ["q_proj", "k_proj", "v_proj"], "exclude_modules": ["k_proj"]},
    ],
)
def test_some_modules(changed: dict[str, Any], tmp_path: Path) -> None:
    some = {full: size for full, size in ALL.items() if full.endswith(("q_proj", "v_proj"))}
    folder = write_adapter(tmp_path / "a", some, **changed)
    assert len(added(folder)) == 4


def test_some_layers(tmp_path: Path) -> None:
    some = {full: size for full, size in ALL.items() if ".1." in full}
    folder = write_adapter(tmp_path / "a", some, layers_to_transform=[1], target_modules="all-linear")
    assert {name[0] for name in added(folder)} == {"1"}


def test_a_text_part_of_a_larger_model(tmp_path: Path) -> None:
    nested = {full.replace("model.", "model.language_model.", 1): size for full, size in ALL.items()}
    pattern = r"model\.language_model\.layers\..*_proj"
    assert len(added(write_adapter(tmp_path / "a", nested, target_modules=pattern))) == 14


EXPERTS = {
    f"model.layers.0.mlp.experts.{expert}.{name}": Module(
        0, f"{linear} {expert}", at, *SIZES[name], None, True
    )
    for expert in range(3)
    for name, linear, at in (
        ("gate_proj", "gate_up", 0),
        ("up_proj", "gate_up", 10),
        ("down_proj", "down", 0),
    )
}
WITH_EXPERTS = LAYOUT._replace(
    modules={**LAYOUT.modules, **EXPERTS},
    fused=tuple(
        Fused("model.layers.0.mlp.experts", name, 0, linear, 3, *size, False)
        for name, linear, size in (("gate_up_proj", "gate_up", (20, 8)), ("down_proj", "down", (8, 10)))
    ),
)
PARAMETERS = ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]


def fused_files(folder: Path, *, swapped: bool = True, **changed: Any) -> tuple[Path, dict[str, Tensor]]:
    """An adapter of all experts, and its tensors by the letters of their names; G: those of gates."""
    shapes = {"GA": (6, 8), "GB": (20, 6), "A": (6, 10), "B": (8, 6)}
    if not swapped:
        shapes = {"GA": (6, 20), "GB": (8, 6), "A": (6, 8), "B": (10, 6)}
    each = {name: torch.randn(shape) for name, shape in shapes.items()}
    stem = "base_model.model.model.layers.0.mlp.experts"
    tensors = {
        f"{stem}{'.base_layer' * (len(name) - 1)}.lora_{name[-1]}.weight": t for name, t in each.items()
    }
    fields = {"r": 2, "lora_alpha": 6, "target_modules": [], "target_parameters": PARAMETERS}
    return write_files(folder, config_of(**{**fields, **changed}), tensors), each


@pytest.mark.parametrize("swapped", [True, False])
def test_parameters_of_all_experts(swapped: bool, tmp_path: Path) -> None:
    """Each expert has its part of the rank: the first matrix counts it by experts, the second by ranks."""
    folder, each = fused_files(tmp_path / "a", swapped=swapped)
    (layer, other) = read_adapter(folder, WITH_EXPERTS, torch.float32, 16).layers
    assert not other
    for name, letter in (("gate_up", "G"), ("down", "")):
        first, second = each[f"{letter}A"].view(3, 2, -1), each[f"{letter}B"].view(-1, 2, 3)
        change = torch.einsum("ore,eri->eoi" if swapped else "ore,eri->eio", second, first)
        for expert in range(3):
            down, ((at, up),) = layer[f"{name} {expert}"]
            assert at == 0
            torch.testing.assert_close(up @ down, 3 * change[expert])


def test_parameters_that_are_missing_of_another_shape_or_of_a_higher_rank(tmp_path: Path) -> None:
    folder, _ = fused_files(tmp_path / "a")
    weights = folder / "adapter_model.safetensors"
    kept = load_file(weights)
    name = "base_model.model.model.layers.0.mlp.experts.lora_B.weight"
    save_file({key: each for key, each in kept.items() if key != name}, weights)
    with pytest.raises(
        AdapterError, match=r"lacks model.layers.0.mlp.experts.lora_B.weight, the change of down"
    ):
        read_adapter(folder, WITH_EXPERTS, torch.float32, 16)
    save_file({**kept, name: torch.zeros(8, 4)}, weights)
    with pytest.raises(AdapterError, match=r"down_proj has the shapes \[6, 10\] and \[8, 4\]"):
        read_adapter(folder, WITH_EXPERTS, torch.float32, 16)
    folder, _ = fused_files(tmp_path / "b", rank_pattern={"down_proj": 17})
    with pytest.raises(AdapterError, match="the rank 17 is above"):
        read_adapter(folder, WITH_EXPERTS, torch.float32, 16)
    folder, _ = fused_files(tmp_path / "c", target_parameters=PARAMETERS[:1])
    with pytest.raises(AdapterError, match="cannot change"):
        read_adapter(folder, WITH_EXPERTS, torch.float32, 16)


def test_modules_of_experts_may_be_absent_all_but_not_some(tmp_path: Path) -> None:
    """Where the base model has its experts as parameters, PEFT finds no modules of them."""
    sizes = {full: (place.outputs, place.inputs) for full, place in EXPERTS.items()}
    folder = write_adapter(tmp_path / "a", ALL)
    assert len(read_adapter(folder, WITH_EXPERTS, torch.float32, 16).layers[0]) == 4
    folder = write_adapter(tmp_path / "b", ALL | sizes)
    assert len(read_adapter(folder, WITH_EXPERTS, torch.float32, 16).layers[0]) == 10
    sizes.pop("model.layers.0.mlp.experts.1.up_proj")
    with pytest.raises(AdapterError, match=r"lacks the modules model.layers.0.mlp.experts.1.up_proj"):
        read_adapter(write_adapter(tmp_path / "c", ALL | sizes), WITH_EXPERTS, torch.float32, 16)


def test_the_digest_is_that_of_both_files(tmp_path: Path) -> None:
    one = read(write_adapter(tmp_path / "a", ALL)).digest
    assert read(write_adapter(tmp_path / "b", ALL)).digest == one
    others = [
        read(write_adapter(tmp_path / "c", ALL, seed=1)).digest,
        read(write_adapter(tmp_path / "d", ALL, lora_alpha=9)).digest,
    ]
    assert len({one, *others}) == 3


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'; only LORA"),
        ({"use_dora": True}, "use_dora: DoRA: not supported"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save: modules that are saved whole"),
        ({"bias": "lora_only"}, "bias is 'lora_only'"),
        ({"lora_bias": True}, "lora_bias"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
        ({"target_parameters": ["experts.down_proj"]}, "has no parameters experts.down_proj"),
        ({"target_parameters": "experts.down_proj"}, "target_parameters must be a list of names"),
        ({"a_new_method": {"strength": 2}}, "a_new_method: unknown settings"),
        ({"r": 17, "lora_alpha": 1}, "the rank 17 is above --max-lora-rank 16"),
        ({"rank_pattern": {"k_proj": 99}}, "the rank 99 is above --max-lora-rank 16"),
        ({"r": 0}, "r must be a rank of at least 1"),
        ({"lora_alpha": "much"}, "lora_alpha must be a number"),
        ({"target_modules": None}, "target_modules must be a list"),
        ({"target_modules": "("}, "no regular expression"),
        ({"layers_to_transform": [1], "layers_pattern": "h"}, "layers_pattern is 'h'"),
        (
            {"layers_to_transform": "01"},
            "the number of a layer or a list of them, got '01'",
        ),
        ({"layers_to_transform": [[0]]}, r"layers_to_transform must be"),
        ({"layers_to_transform": {"a": 1}}, r"layers_to_transform must be"),
        ({"layers_to_transform": [True]}, r"layers_to_transform must be"),
        ({"target_modules": "(.*)*x"}, "target_modules has '(.*)*x', which may take long"),
        ({"target_modules": "(?:a|a)" * 30}, "which may take long"),
        ({"exclude_modules": "a?" * 30 + "a" * 30}, "which may take long"),
        ({"rank_pattern": {"(a+)+$": 2}}, "rank_pattern has '(a+)+$', which may take long"),
        (
            {"alpha_pattern": {"(?i)q_proj": 2}},
            "alpha_pattern has '(?i)q_proj', which is no regular expression",
        ),
        ({"r": "9" * 100_000}, "9…"),
    ],
)
def test_settings_that_are_refused_by_name(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = write_files(tmp_path / "a", config_of(**changed), {"x": torch.zeros(1)})
    with pytest.raises(AdapterError) as refused:
        read(folder)
    assert message in str(refused.value)


Q0, EXTRA = module("q_proj", 0), "base_model.model.lm_head.lora_A.weight"


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        (f"base_model.model.{Q0}.lora_B.weight", None, f"lacks {Q0}.lora_B.weight"),
        (f"base_model.model.{Q0}.lora_A.weight", torch.zeros(4, 9), "has the shape [4, 9]"),
        (f"base_model.model.{Q0}.lora_B.weight", torch.zeros(12, 3), "has the shape [12, 3]"),
        (f"base_model.model.{Q0}.lora_A.weight", torch.zeros(4, 8).int(), "floating-point numbers"),
        (EXTRA, torch.zeros(4, 8), f"cannot change in TinyForCausalLM: {EXTRA}"),
        (f"base_model.model.{Q0}.lora_magnitude_vector", torch.zeros(12), "lora_magnitude_vector"),
        ("base_model.model.model.layers.2.mlp.up_proj.lora_A.weight", torch.zeros(4, 8), "layers.2.mlp"),
    ],
)
def test_tensors_that_are_refused_by_name(
    name: str, tensor: Tensor | None, message: str, tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path / "a", ALL)
    tensors = load_file(folder / "adapter_model.safetensors")
    if tensor is None:
        del tensors[name]
    else:
        tensors[name] = tensor
    save_file(tensors, folder / "adapter_model.safetensors")
    with pytest.raises(AdapterError) as refused:
        read(folder)
    assert message in str(refused.value)


def test_modules_are_those_that_the_config_names(tmp_path: Path) -> None:
    some = {full: size for full, size in ALL.items() if "down_proj" not in full}
    with pytest.raises(AdapterError, match=r"lacks the modules .*down_proj.*names as targets"):
        read(write_adapter(tmp_path / "a", some))
    with pytest.raises(AdapterError, match="does not name as targets"):
        read(write_adapter(tmp_path / "b", ALL, target_modules=["q_proj"]))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(AdapterMissing, match=r"adapter_config.json cannot be read: No such file"):
        read(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(AdapterMissing, match=r"adapter_config.json cannot be read: Not a directory"):
        read(tmp_path / "file")
    folder = write_adapter(tmp_path / "a", ALL)
    weights = folder / "adapter_model.safetensors"
    weights.rename(folder / "adapter_model.bin")
    with pytest.raises(AdapterError, match="a pickle, which can run code"):
        read(folder)
    weights.write_bytes(b"\xff" * 100)
    with pytest.raises(AdapterError, match="cannot be read as safetensors"):
        read(folder)
    (folder / "adapter_config.json").write_text("[]")
    with pytest.raises(AdapterError, match="not a JSON object"):
        read(folder)
    write_files(folder, config_of(), {"x": torch.zeros(6_000_000)})
    with pytest.raises(AdapterError, match="has at most"):
        read(folder)


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"r": ' * 100_000, "[1]", "\ufeff{", '{"r": ' + "9" * 5000 + "}"]
)
def test_a_config_that_is_no_object_of_json(text: str, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", ALL)
    (folder / "adapter_config.json").write_text(text)
    with pytest.raises(AdapterError, match=r"adapter_config.json") as error:
        read(folder)
    assert len(str(error.value)) < 400


def test_a_dtype_that_torch_does_not_have(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", ALL)
    header = b'{"x":{"dtype":"F4","shape":[4,8],"data_offsets":[0,16]}}'
    weights = len(header).to_bytes(8, "little") + header + bytes(16)
    (folder / "adapter_model.safetensors").write_bytes(weights)
    with pytest.raises(AdapterError, match="has the dtype 'F4', which is not supported"):
        read(folder)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
@pytest.mark.parametrize("kind", ["pipe", "endless", "folder"])
def test_what_is_no_file_is_not_read(name: str, kind: str, tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "a", ALL) / name
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "endless":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with pytest.raises(AdapterError, match=f"{name} is not a file"):
            read(path.parent)
    assert len(os.listdir("/proc/self/fd")) <= before  # none stays open; others may have been closed


@pytest.mark.parametrize("value", [math.nan, math.inf, 3e38])
@pytest.mark.parametrize("part", ["lora_A", "lora_B"])
def test_values_must_be_finite_in_the_dtype_of_activations(value: float, part: str, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", ALL)
    tensors = load_file(folder / "adapter_model.safetensors")
    tensors[f"base_model.model.{module('q_proj', 1)}.{part}.weight"][0, 0] = value
    save_file(tensors, folder / "adapter_model.safetensors")
    with pytest.raises(AdapterError, match=r"layers.1.self_attn.q_proj has values that are not finite"):
        read_adapter(folder, LAYOUT, torch.float16, 16)
