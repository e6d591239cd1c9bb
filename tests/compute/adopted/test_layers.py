import dataclasses
from functools import partial
from typing import Any

import pytest
import torch

from headrace.compute.adopted.agreement import first_step
from headrace.compute.adopted.attention import NAME, Recording, heard_by, register
from headrace.compute.adopted.decoder import AdoptedDecoder, cut
from headrace.compute.adopted.layers import fuse
from headrace.compute.adopted.modules import replace
from headrace.compute.batch import StepInterrupt, StepInterrupted
from headrace.compute.kernels import KernelsUnavailable, select
from headrace.compute.model.kv import PagedKV
from headrace.compute.model.shape import ModelShape
from tests.compute.adopted.models import logits, tiny
from tests.oracle.harness import pack

CPU = torch.device("cpu")

try:
    KERNELS = select("cpp", CPU)
except KernelsUnavailable as error:
    pytest.skip(str(error), allow_module_level=True)


def _adopt(model: Any) -> tuple[AdoptedDecoder, Any]:
    """A model over pages, with replaced modules; and what runs it on a batch."""
    tokens = torch.randint(3, 120, (40,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        computed = cut(model, lambda: model(input_ids=tokens[None], use_cache=False))
        register()
        model.set_attn_implementation(NAME)
        recording = Recording(256)
        with heard_by(recording):
            computed.states(tokens, torch.arange(40))
    heads = tuple(layer.shape for layer in recording.layers)
    shape = ModelShape("", 120, 64, 96, heads, 256, 256, 0, 0, 0, tied_embeddings=False, dtype="float32")
    decoder = AdoptedDecoder(computed, shape, recording.layers, KERNELS, None)
    replace(model, KERNELS)
    return decoder, computed


def _fuse(decoder: AdoptedDecoder, computed: Any) -> int:
    rows = [torch.arange(3, 43), torch.arange(50, 73)]
    batch, kv = first_step(rows, decoder, 256)
    run = partial(computed.states, batch.tokens.long(), batch.positions)
    return fuse(computed.model, KERNELS, decoder._layers, batch, kv.layers, run)


def _in_chunks(decoder: AdoptedDecoder, length: int) -> torch.Tensor:
    """Logits of the row of `models.logits`, in chunks over pages."""
    tokens = torch.randint(3, 120, (1, length), generator=torch.Generator().manual_seed(1))[0].tolist()
    kv = PagedKV(decoder.shape, 8, 8, decoder.dtype, CPU)
    parts, done = [], 0
    for size in (7, 1, 1, 5, length):
        size = min(size, length - done)
        if size:
            batch = pack(tokens[done : done + size], [done], [size], [[5, 2, 7]], list(range(size)), 8, CPU)
            parts.append(decoder.logits(decoder.hidden(batch, kv)).float())
            done += size
    return torch.cat(parts)


FUSED = {
    "llama": 2,
    "mistral": 2,
    "qwen2": 2,
    "qwen3": 2,
    "gemma": 2,
    "gemma2": 2,
    "gemma3_text": 2,
    "phi3": 2,
    "smollm3": 2,
    "seed_oss": 2,
    "granite": 0,  # multiplies what it adds to its states
    "olmo2": 0,  # norms only the results of attention and MLP
    "cohere": 0,  # adds attention and MLP at once
    "glm4": 0,  # rotates pairs of neighbours
    "starcoder2": 0,
    "qwen3_moe": 0,
    "gpt_oss": 0,
}


@pytest.mark.parametrize("kind", FUSED)
def test_layers_in_one_call_compute_the_same(kind: str) -> None:
    fields: dict[str, Any] = {"rms_norm_eps": 1e-5} if kind != "starcoder2" else {}
    if kind == "granite":
        fields |= {"residual_multiplier": 0.3}
    if kind == "smollm3":
        fields |= {"no_rope_layers": [0, 1]}
    model = tiny(kind, **fields)
    expected = logits(model)
    decoder, computed = _adopt(model)
    assert _fuse(decoder, computed) == FUSED[kind]
    got = _in_chunks(decoder, len(expected))
    assert float((got - expected).abs().max() / expected.std()) < 1e-3


def test_it_works_in_bfloat16() -> None:
    model = tiny("qwen3", torch.bfloat16)
    expected = logits(model)
    decoder, computed = _adopt(model)
    assert _fuse(decoder, computed) == 2
    got = _in_chunks(decoder, len(expected))
    assert float(((got - expected).abs().amax(-1) / expected.std()).median()) < 0.15


def test_neighbours_are_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama", num_hidden_layers=3)
    decoder, computed = _adopt(model)
    assert _fuse(decoder, computed) == 3
    run, counts = KERNELS.run_layers, []
    monkeypatch.setattr(
        KERNELS, "run_layers", lambda layers, *given: counts.append(len(layers.table)) or run(layers, *given)
    )
    _in_chunks(decoder, 5)
    assert counts == [3]


def test_a_layer_whose_heads_differ_stays() -> None:
    """The same modules, but queries are scaled after their norm and rotation: only the comparison can know."""
    model = tiny("llama")
    attention = model.model.layers[1].self_attn
    plain = attention.forward
    attention.forward = lambda hidden_states, **given: plain(
        hidden_states,
        **{**given, "position_embeddings": [0.5 * each for each in given["position_embeddings"]]},
    )
    expected = logits(model)
    decoder, computed = _adopt(model)
    assert _fuse(decoder, computed) == 1
    got = _in_chunks(decoder, len(expected))
    assert float((got - expected).abs().max() / expected.std()) < 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_layer_that_scales_queries_far_from_the_beginning_stays(dtype: torch.dtype) -> None:
    model = tiny("ministral3", dtype, **_far_scaling())
    decoder, computed = _adopt(model)
    assert _fuse(decoder, computed) == 0


def _far_scaling() -> dict[str, Any]:
    """Queries from position 128 on are multiplied by a little more than 1."""
    parameters = {"rope_type": "default", "rope_theta": 10000.0, "llama_4_scaling_beta": 0.03}
    return {"rope_parameters": parameters | {"original_max_position_embeddings": 128}}


def test_states_that_change_between_layers_are_noticed() -> None:
    model = tiny("llama")
    decoder, computed = _adopt(model)
    assert _fuse(decoder, computed) == 2
    model.model.layers[1].register_forward_pre_hook(lambda module, args: (args[0] + 0.0,))
    with pytest.raises(RuntimeError, match="changed between two layers"):
        _in_chunks(decoder, 5)


def test_a_step_is_interrupted_between_layers() -> None:
    model = tiny("llama")
    decoder, computed = _adopt(model)
    _fuse(decoder, computed)
    batch, kv = first_step([torch.arange(3, 13)], decoder, 256)
    interrupt = StepInterrupt()
    interrupt.set()
    with pytest.raises(StepInterrupted):
        decoder.hidden(dataclasses.replace(batch, interrupt=interrupt), kv)


def test_other_kernels_compute_layers_as_they_are() -> None:
    assert fuse(torch.nn.Linear(2, 2), select("torch", CPU), [], None, [], lambda: None) == 0  # type: ignore[arg-type]
