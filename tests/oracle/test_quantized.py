"""Checkpoints of every format, against transformers with the same weights written out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from headrace.compute.checkpoint import ModelError
from headrace.compute.kernels import KernelsUnavailable, select
from headrace.compute.model.decoder import Decoder
from headrace.compute.model.families import parse_config
from headrace.compute.model.hub import read_config
from headrace.compute.model.weights import load_weights
from tests.compute.quantization import packing
from tests.oracle.families import CASES, VOCAB
from tests.oracle.harness import DEVICE, Rig, Sequence
from tests.oracle.stored_formats import (
    FORMATS,
    SPARED,
    SPARING,
    Written,
    compressed,
    in_few_bits,
    integer,
    rewrite,
)


def write(folder: Path, config: dict[str, Any], written: Written, spared: tuple[str, ...] = ()) -> nn.Module:
    """A tiny checkpoint whose linears are stored so; the model in transformers that has the weights they are."""
    model = CASES["llama"].build(folder)
    store_again(folder, model, config, written, spared)
    return model


def store_again(
    folder: Path, model: nn.Module, config: dict[str, Any], written: Written, spared: tuple[str, ...] = ()
) -> None:
    """Store the linears of a checkpoint so, and give ``model`` the weights that they are then."""
    left = {"lm_head", *spared}
    linears = [
        name for name, each in model.named_modules() if isinstance(each, nn.Linear) and name not in left
    ]
    with torch.no_grad():
        for name, dense in rewrite(folder, config, written, linears).items():
            model.get_parameter(name).copy_(dense)


def compare(folder: Path, model: nn.Module, tolerance: float = 2e-4) -> Rig:
    tokens = torch.randint(1, VOCAB, (24,), generator=torch.Generator().manual_seed(5)).tolist()
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0]
    assert expected.std() > 0.3
    rig = Rig(folder, max_model_len=64)
    actual = rig.logits(Sequence(tokens), [24])
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
    return rig


@pytest.mark.parametrize("name", FORMATS)
def test_a_checkpoint_of_this_format_gives_the_logits_of_its_weights(tmp_path: Path, name: str) -> None:
    config, written = FORMATS[name]
    compare(tmp_path, write(tmp_path, config, written))


@pytest.mark.parametrize("name", ["gptq", "awq", "packed", "fp8-block"])
def test_what_is_excepted_is_read_as_it_is(tmp_path: Path, name: str) -> None:
    config, written = FORMATS[name]
    field = SPARING.get(config["quant_method"], "ignore")
    compare(tmp_path, write(tmp_path, config | {field: [*config.get(field, []), SPARED]}, written, (SPARED,)))


def test_activations_of_w8a8_are_rounded_per_token(tmp_path: Path) -> None:
    activations = {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True}
    config = compressed("int-quantized", integer(8, "channel", True), activations)
    written = in_few_bits(lambda x: packing.int_quantized(x, symmetric=True), 8, group=None, symmetric=True)
    model = write(tmp_path, config, written)

    def rounded(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        scale = inputs[0].abs().amax(-1, keepdim=True) / 127
        return ((inputs[0] / scale).round() * scale,)

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            module.register_forward_pre_hook(rounded)
    # A value at the edge of two integers may fall to either side: the next layers see a step of difference.
    compare(tmp_path, model, tolerance=0.05)


def test_parts_that_differ_are_computed_as_one_all_the_same(tmp_path: Path) -> None:
    """Keys are spared, so queries, keys and values are written out and merged."""
    config, written = FORMATS["packed"]
    spared = "model.layers.0.self_attn.k_proj"
    compare(
        tmp_path,
        write(tmp_path, config | {"ignore": ["re:.*layers.0.*k_proj", "lm_head"]}, written, (spared,)),
    )


def test_a_bias_of_zeros_that_the_model_has_not_is_passed_over(tmp_path: Path) -> None:
    config, written = FORMATS["gptq"]
    model = write(tmp_path, config, written)
    tensors = load_file(tmp_path / "model.safetensors")
    bias = "model.layers.0.mlp.up_proj.bias"
    save_file(tensors | {bias: torch.zeros(48)}, tmp_path / "model.safetensors")
    compare(tmp_path, model)
    save_file(tensors | {bias: torch.ones(48)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"does not use: model\.layers\.0\.mlp\.up_proj\.bias"):
        Rig(tmp_path, max_model_len=64)


def in_one(folder: Path, kind: str) -> None:
    """Store the experts of each layer as one tensor each, with the names that transformers 5 has in memory."""
    tensors = load_file(folder / "model.safetensors")
    apart = sorted(name for name in tensors if ".experts." in name)
    modules = {
        "w1": "gate",
        "w3": "up",
        "w2": "down",
        "gate_proj": "gate",
        "up_proj": "up",
        "down_proj": "down",
    }
    found: dict[str, dict[str, dict[int, Tensor]]] = {}
    for name in apart:
        block, rest = name.replace(".block_sparse_moe.", ".mlp.").split(".experts.")
        number, module = rest.split(".")[:2]
        found.setdefault(block, {}).setdefault(modules[module], {})[int(number)] = tensors.pop(name)
    assert found, kind
    for block, parts in found.items():
        first = [kind for kind in ("gate", "up") if kind in parts]
        pairs = [torch.cat([parts[kind][number] for kind in first]) for number in range(len(parts["up"]))]
        tensors[f"{block}.experts.{'_'.join(first)}_proj"] = torch.stack(pairs)
        tensors[f"{block}.experts.down_proj"] = torch.stack([parts["down"][n] for n in range(len(pairs))])
    renamed = {name.replace(".block_sparse_moe.", ".mlp."): tensor for name, tensor in tensors.items()}
    save_file(renamed, folder / "model.safetensors")


@pytest.mark.parametrize(
    "kind", ["qwen3_moe", "qwen2_moe", "glm4_moe", "minimax_m2", "mixtral", "olmoe", "nemotron_h-experts"]
)
def test_experts_stored_as_one_tensor_are_those_stored_apart(tmp_path: Path, kind: str) -> None:
    model = CASES[kind].build(tmp_path)
    in_one(tmp_path, kind)
    compare(tmp_path, model)


def test_experts_as_one_tensor_of_another_shape_are_refused(tmp_path: Path) -> None:
    CASES["mixtral"].build(tmp_path)
    in_one(tmp_path, "mixtral")
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj"
    save_file(tensors | {name: tensors[name][:3].clone()}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"down_proj has shape \[3, 32, 48\], the config says 4 experts"):
        Rig(tmp_path, max_model_len=64)
    tensors[f"{name}_scale_inv"] = torch.ones(4)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"does not use: .*down_proj_scale_inv"):
        Rig(tmp_path, max_model_len=64)


MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
}


def test_experts_in_mxfp4_are_computed_without_rounding_their_weights(tmp_path: Path) -> None:
    model = CASES["gpt_oss-quantizable"].build(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    generator = torch.Generator().manual_seed(3)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), generator=generator).byte()
        scales = torch.randint(122, 126, blocks.shape[:3], generator=generator).byte()
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        with torch.no_grad():
            model.get_parameter(name).copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
    save_file(tensors, tmp_path / "model.safetensors")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": MXFP4}))
    compare(tmp_path, model)
    for kernels in ("cpp", "torch"):
        rig = Rig(tmp_path, max_model_len=64, kernels=kernels)
        tokens = list(range(1, 30))
        with torch.inference_mode():
            expected = model(torch.tensor([tokens])).logits[0]
        torch.testing.assert_close(rig.logits(Sequence(tokens), [11, 1, 5]), expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize(
    ("end", "change", "message"),
    [
        (
            "down_proj",
            lambda x: x[:3],
            r"down_proj has shape \[3, 32, 64\], the config says 4 experts of 64 outputs",
        ),
        ("gate_up_proj_bias", lambda x: x[:, :60], r"gate_up_proj_bias has shape \[4, 60\]"),
        ("sinks", lambda x: x[:2], r"sinks has shape \[2\], the config says \[4\]"),
    ],
)
def test_tensors_of_gpt_oss_of_another_shape_are_refused(
    end: str, change: Callable[[Tensor], Tensor], message: str, tmp_path: Path
) -> None:
    CASES["gpt_oss-quantizable"].build(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = next(name for name in sorted(tensors) if name.endswith(end))
    save_file(tensors | {name: change(tensors[name]).contiguous()}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=message):
        Rig(tmp_path, max_model_len=64)


@pytest.mark.parametrize("name", ["gptq", "awq", "packed", "fp8-block"])
def test_experts_in_this_format_give_the_logits_of_their_weights(tmp_path: Path, name: str) -> None:
    config, written = FORMATS[name]
    model = CASES["qwen3_moe-quantizable"].build(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    experts = {module.removesuffix(".weight") for module in tensors if ".experts." in module}
    for seed, module in enumerate(sorted(experts)):
        stored, dense = written(tuple(tensors.pop(f"{module}.weight").shape), seed)
        tensors |= {f"{module}.{suffix}": part for suffix, part in stored.items()}
        block, _, number, which = module.rsplit(".", 3)
        held = model.get_submodule(f"{block}.experts")
        rows = {"gate_proj": slice(0, 32), "up_proj": slice(32, 64), "down_proj": slice(None)}[which]
        with torch.no_grad():
            getattr(held, "down_proj" if which == "down_proj" else "gate_up_proj")[int(number), rows] = dense
    save_file(tensors, tmp_path / "model.safetensors")
    path = tmp_path / "config.json"
    others = ["re:.*self_attn.*", "re:.*mlp.gate$", "lm_head"]
    field = SPARING.get(config["quant_method"], "ignore")
    if field != "ignore":
        others = ["self_attn", "mlp.gate", "lm_head"]
    quantized = {"quantization_config": config | {field: others}}
    path.write_text(json.dumps(json.loads(path.read_text()) | quantized))
    compare(tmp_path, model)


@pytest.mark.parametrize(
    ("scheme", "quantization", "far"), [("int8", "63 W8A8", 0.1), ("int4", "62 W4A16, 1 W8A8", 1.0)]
)
def test_experts_without_gates_are_rounded_at_start(
    tmp_path: Path, scheme: str, quantization: str, far: float
) -> None:
    """By both kernels alike, and not far from what they were."""
    model = CASES["nemotron_h-experts"].build(tmp_path)
    tokens = torch.randint(1, VOCAB, (24,), generator=torch.Generator().manual_seed(5)).tolist()
    with torch.no_grad():
        exact = model(torch.tensor([tokens])).logits[0]
    spec, found = parse_config(read_config(tmp_path)), []
    for kernels in ("torch", "cpp"):
        try:
            selected = select(kernels, DEVICE)
        except KernelsUnavailable as error:
            pytest.skip(str(error))
        weights = load_weights(tmp_path, spec, torch.float32, DEVICE, scheme)
        assert weights.quantization == quantization
        rig = Rig.over(Decoder(spec, weights, selected, 64))
        found.append(rig.logits(Sequence(tokens), [24]))
    torch.testing.assert_close(found[1], found[0], rtol=2e-2, atol=2e-2)
    assert 1e-3 < (found[0] - exact).square().mean().sqrt() < far * exact.std()
