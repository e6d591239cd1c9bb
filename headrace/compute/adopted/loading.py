"""Loads models that transformers defines, and refuses those that the engine would compute wrongly.

```
 config.json -> its class, empty -> sizes, refusals      before weights are read
 safetensors -> weights -> its own logits -> recorded calls of attention -> kernels in its modules -> agreement
```
Code of a checkpoint is never run (``trust_remote_code``), and pickles are never read.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headrace.compute.adopted.agreement import Rows, check_agreement, first_step, sample_rows
from headrace.compute.adopted.attention import NAME, Layer, Recording, heard_by, register
from headrace.compute.adopted.decoder import (
    AdoptedDecoder,
    AdoptedModel,
    cut,
    first_position,
    takes_positions,
)
from headrace.compute.adopted.layers import fuse
from headrace.compute.adopted.modules import held_bytes
from headrace.compute.adopted.modules import replace as replace_modules
from headrace.compute.adopted.states import SequenceStates, mixers_of, redirect
from headrace.compute.checkpoint import Checkpoint, ModelError, listed
from headrace.compute.kernels import HeadShape, Kernels
from headrace.compute.model.hub import read_config
from headrace.compute.model.layout import parts_of, read_linear
from headrace.compute.model.shape import LayerShape, ModelShape
from headrace.compute.model.weights import digest
from headrace.compute.quantization.formats import read_format
from headrace.compute.quantization.scheme import HEAD, Scheme, StoredFormat
from headrace.compute.quantization.weight import QuantizedWeight

# Linear layers that a checkpoint stores quantized, for a model of another library.
#
# `quantization.formats` says how each is stored. They are found by the path of their module in the model,
# which is its name in the checkpoint; a model whose tensors are renamed or merged when they are loaded is
# refused.


class StoredLinears(NamedTuple):
    """The weights by path, and the names of all tensors in the checkpoint that they are made of."""

    weights: Mapping[str, QuantizedWeight]
    names: frozenset[str]


def take_format(config: Any) -> StoredFormat | None:
    """The format of a checkpoint by its config, from which it is taken; None: its linears are plain.

    Raises:
        ModelError: the format is not supported.
    """
    for part in (config, config.get_text_config()):
        described = getattr(part, "quantization_config", None)
        if described:
            del part.quantization_config  # the other library would look for its own kernels
            fields = described if isinstance(described, Mapping) else described.to_dict()
            return read_format(fields)
    return None


def read_stored(folder: Path, model: nn.Module, stored: StoredFormat) -> StoredLinears:
    """Give linears that are stored quantized their dequantized weights, and return the weights as stored.

    A weight that can only be computed dequantized is not among them.

    Raises:
        ModelError: tensors are missing or do not fit.
    """
    weights: dict[str, QuantizedWeight] = {}
    names: set[str] = set()
    with Checkpoint(folder, str) as checkpoint, torch.no_grad():
        for path, module in model.named_modules():
            layout = stored.layout_of(path) if isinstance(module, nn.Linear) else None
            if layout is None or not isinstance(module, nn.Linear):
                continue
            found = parts_of(checkpoint, layout, path)
            missing = [f"{path}.{each}" for each in layout.required if each not in found]
            if missing:
                raise ModelError(f"{folder} is stored as {stored.name}, and lacks {listed(missing)}")
            weight = read_linear(checkpoint, layout, path, (module.out_features, module.in_features))
            names.update(found.values(), {f"{path}.weight"})
            if module.bias is None and f"{path}.bias" in checkpoint.names:
                if checkpoint.read(f"{path}.bias").any():
                    raise ModelError(f"{folder} has {path}.bias, which the model does not use")
                names.add(f"{path}.bias")  # some writers add zeros
            if isinstance(weight, QuantizedWeight):
                weights[path] = weight
                weight = weight.dequantized()
            module.weight.copy_(weight)
    return StoredLinears(weights, frozenset(names))


# Counts in a config of transformers that are checked before its model is built: each is so many modules.
#
# A module takes some kilobytes even without memory for its weights, so a count of a billion would fill the
# machine.

MAX_COUNT = 1 << 16
"""The most of one kind of module."""

MAX_MODULES = 1 << 18
"""The most experts of all layers together, or of other modules within each other."""

_LAYERS = re.compile(r"(?:^|_)(?:n_?layers?|num_layers|(?:\w+_)?layers|layers_\w+|depths?)$")
_WITHIN = re.compile(r"(?:^|_)(?:experts?|blocks?)$")
_OTHER = re.compile(r"(?:^|_)(?:heads?|stages|codebooks|quantizers|streams|hops)$")


def check_counts(config: Mapping[str, Any]) -> None:
    """Raise `ModelError` if a config asks for more modules than a model has."""
    most_layers = most_within = 1
    for name, count in _counts(config):
        if count > MAX_COUNT:
            raise ModelError(f"{name} must be at most {MAX_COUNT}, the config has {str(count)[:24]}")
        most_layers = max(most_layers, count if _LAYERS.search(name) else 1)
        most_within = max(most_within, count if _WITHIN.search(name) else 1)
    if most_layers * most_within > MAX_MODULES:
        raise ModelError(
            f"the config has {most_layers} layers with {most_within} modules each, more than {MAX_MODULES} together"
        )


def _counts(value: Any) -> Iterator[tuple[str, int]]:
    """The names and values of integers that count modules, at any depth."""
    if isinstance(value, Mapping):
        for name, each in value.items():
            if isinstance(name, str) and any(form.search(name) for form in (_LAYERS, _WITHIN, _OTHER)):
                listed = each if isinstance(each, list | tuple) else (each,)
                yield from ((name, one) for one in listed if isinstance(one, int))
            yield from _counts(each)
    elif isinstance(value, list | tuple):
        for each in value:
            if isinstance(each, Mapping):
                yield from _counts(each)


_EXPERTS_OF_A_TOKEN = ("num_experts_per_tok", "moe_topk", "num_experts_per_token", "moe_k", "top_k_experts")
_POSITIONS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "max_sequence_length",
    "max_target_positions",
    "n_ctx",
)
_BY_LENGTH = frozenset({"dynamic", "longrope"})
_HARMLESS = (".inv_freq", ".masked_bias", ".attn.bias", ".attention.bias", ".attention.masked_bias")


@dataclass(frozen=True, slots=True)
class Adoptable:
    """A model whose config and class are known; ``shape`` has an estimate of its layers until it is loaded.

    ``first`` is the position of a sequence's first token, ``stored`` the format of linear layers that are stored
    quantized.
    """

    folder: Path
    config: Any
    kind: Any
    shape: ModelShape
    first: int = 0
    stored: StoredFormat | None = None


@dataclass(frozen=True, slots=True)
class Adopted:
    """A loaded model that agrees with transformers. ``replaced`` counts modules that the kernels compute, ``digest``
    is that of its weights (empty: not asked for).
    """

    decoder: AdoptedDecoder
    replaced: Mapping[str, int]
    digest: str


def read_adoptable(folder: Path) -> Adoptable:
    """The class and the sizes of the model in a folder, from its config.

    Raises:
        ModelError: transformers has no such model, or one that cannot be served.
    """
    config = read_class_config(folder)
    kind = class_of(config)
    if getattr(config, "is_encoder_decoder", False):
        raise _refused(kind.__name__, "encoder-decoder models are not supported")
    stored = take_format(config)
    with quiet(), _named(kind.__name__, "its config cannot be used"), torch.device("meta"):
        empty = kind(config).eval()
    _check_structure(empty)
    shape = _shape(empty, config)
    if first := first_position(empty, shape.max_positions):
        shape = replace(shape, max_positions=shape.max_positions - first, reach=shape.reach - first)
    return Adoptable(folder, config, kind, shape, first, stored)


def load_adopted(
    found: Adoptable,
    kernels: Kernels,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
    dummy_seed: int | None = None,
    *,
    scheme: Scheme | None = None,
    with_digest: bool = False,
) -> Adopted:
    """Load the weights, and check that the model computes the same over paged memory.

    Raises:
        ModelError: tensors are missing or unexpected, or the results differ.
    """
    if scheme is not None and found.stored is not None:
        raise ModelError("--quantization: the checkpoint is already quantized; omit this option")
    register()
    with quiet(), _named(found.kind.__name__, "it cannot be loaded"):
        model, stored = _weights(found, dtype, dummy_seed)
        model = model.to(device)
    vocab_size = found.shape.vocab_size
    tokens = sample_rows(vocab_size, max_model_len, _special(found.config))
    with _named(found.kind.__name__, "transformers cannot compute it"), torch.inference_mode():
        expected = Rows(tokens, (_plain_logits(model, tokens[0]), _plain_logits(model, tokens[1])))
    with _named(found.kind.__name__, "it cannot be computed over paged memory"), torch.inference_mode():
        mixers = mixers_of(model)
        redirect(mixers)
        states = SequenceStates(found.config, kernels.copy) if mixers else None
        computed = cut(model, lambda: _plain_logits(model, tokens[0]), found.first)
        model.set_attn_implementation(NAME)
        layers = _record(computed, tokens[0].to(device), max_model_len)
        shape = replace(found.shape, layers=tuple(layer.shape for layer in layers))
        weights = digest("", model.parameters()) if with_digest else ""
        decoder = AdoptedDecoder(computed, shape, layers, kernels, states)
        eight = any(weight.activation_bits == 8 for weight in stored.values())
        rounded = scheme is not None or eight  # which is not an error
        if rounded:
            _check(decoder, expected, states)
        on_device = {path: weight.to(device) for path, weight in stored.items()}
        replaced = Counter[str]()
        head = model.get_output_embeddings()
        if scheme is not None:
            replaced += replace_modules(head, kernels, scheme=HEAD, name="the head", head=head)
        replaced += replace_modules(model, kernels, scheme=scheme, stored=on_device, head=head)
        decoder.nbytes = held_bytes(model)
        if states is None:
            batch, kv = first_step(tokens, decoder, max_model_len)
            run = functools.partial(computed.states, batch.tokens.long(), batch.positions)
            replaced["layers in one call"] = fuse(model, kernels, layers, batch, kv.layers, run)
        if not rounded:
            _check(decoder, expected, states)
        if states is not None:
            decoder.shape = replace(decoder.shape, state_bytes=states.sequence_bytes)
    return Adopted(decoder, +replaced, weights)


def _check(decoder: AdoptedDecoder, expected: Rows, states: SequenceStates | None) -> None:
    """Compare with the model alone; its mixers may need to compute continued rows token by token."""
    try:
        check_agreement(decoder, expected)
    except (ModelError, RuntimeError):
        if states is None:
            raise
        states.token_by_token = True
        check_agreement(decoder, expected)


def read_class_config(folder: Path) -> Any:
    """The config of a model as its class in transformers reads it.

    Raises:
        ModelError: transformers has no such model.
    """
    check_counts(read_config(folder))
    from transformers import AutoConfig

    try:
        with quiet():
            return AutoConfig.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
    except Exception as error:  # whatever a config makes another library raise
        text = (folder / "config.json").read_text(errors="replace")
        own = '"auto_map"' in text
        why = "it needs code of its own (auto_map), which is never run" if own else _first_line(error)
        raise ModelError(f"{folder}: transformers does not support this model: {why}") from error


def class_of(config: Any) -> Any:
    """The class of a config's model that generates text: the one that it names, or else the usual one."""
    import transformers
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, GenerationMixin

    kinds: list[Any] = []
    for auto in (AutoModelForCausalLM, AutoModelForImageTextToText):
        with contextlib.suppress(KeyError):
            found = auto._model_mapping[type(config)]
            kinds += found if isinstance(found, tuple | list) else [found]
    named = (getattr(config, "architectures", None) or ["none"])[0]
    own = getattr(transformers, named, None)
    generates = isinstance(own, type) and issubclass(own, GenerationMixin)
    if generates and getattr(own, "config_class", None) is type(config):
        return own
    if not kinds:
        raise ModelError(f"architecture {named}: transformers has no model of it that generates text")
    return kinds[0]


def _check_structure(model: Any) -> None:
    """Refuse a model whose modules show that it keeps more than keys and values."""
    kind = type(model).__name__
    if model.get_output_embeddings() is None:
        raise _refused(kind, "it has no head that yields logits of tokens")
    for module in model.modules():
        found = getattr(module, "rope_type", None)
        types = {*found.values()} if isinstance(found, dict) else {found}
        if by_length := types & _BY_LENGTH:
            raise _refused(
                kind, f"its rotary embedding depends on the longest sequence of a step ({by_length.pop()})"
            )
    base = getattr(model, model.base_model_prefix, None)
    if isinstance(base, nn.Module) and base is not model and not takes_positions(base):
        raise _refused(kind, "it takes no positions of tokens")


def _shape(model: Any, config: Any) -> ModelShape:
    text = config.get_text_config()
    head: Tensor = model.get_output_embeddings().weight
    hidden = text.hidden_size
    own = getattr(text, "is_heterogeneous", False)  # layers whose fields differ from the config's
    configs = text.per_layer_config if own else [text] * text.num_hidden_layers
    longest = next(
        (value for name in _POSITIONS if isinstance(value := getattr(text, name, None), int)), 2048
    )
    parameters = {id(each): each for each in model.parameters()}.values()
    widths = [
        module.out_features
        for module in model.modules()
        if isinstance(module, nn.Linear) and module.weight is not head
    ]
    return ModelShape(
        architecture=type(model).__name__,
        vocab_size=head.shape[0],
        hidden_size=hidden,
        intermediate_size=max([hidden, *widths]),
        layers=tuple(LayerShape(_heads(each, hidden)) for each in configs),
        max_positions=longest,
        reach=longest,
        position_bytes=0,
        num_parameters=sum(each.numel() for each in parameters),
        token_parameters=sum(int(each.numel() * _share(each, text)) for each in parameters),
        tied_embeddings=bool(getattr(config, "tie_word_embeddings", False)),
        dtype=str(getattr(config, "dtype", None) or getattr(text, "dtype", None) or "bfloat16").removeprefix(
            "torch."
        ),
    )


def _heads(config: Any, hidden: int) -> HeadShape:
    """The heads of a layer by its config."""
    heads = getattr(config, "num_attention_heads", 1)
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return HeadShape(heads, kv_heads, getattr(config, "head_dim", None) or hidden // heads)


def _share(parameter: Tensor, text: Any) -> float:
    """The part of a parameter that a token is multiplied with: some of many experts."""
    most = next((value for name in _EXPERTS_OF_A_TOKEN if (value := getattr(text, name, None))), None)
    return min(1.0, most / len(parameter)) if parameter.ndim == 3 and isinstance(most, int) else 1.0


def _weights(
    found: Adoptable, dtype: torch.dtype, dummy_seed: int | None
) -> tuple[Any, Mapping[str, QuantizedWeight]]:
    """The model with its weights in a dtype, and eager attention; and those that are stored quantized, by path.

    Raises:
        ModelError: tensors are missing, unexpected or of another shape.
    """
    if dummy_seed is not None:
        with torch.random.fork_rng():
            torch.manual_seed(dummy_seed)
            return found.kind._from_config(found.config, dtype=dtype, attn_implementation="eager").eval(), {}
    with Checkpoint(found.folder, str):
        pass  # it refuses pickles and broken files
    model, info = found.kind.from_pretrained(
        str(found.folder),
        config=found.config,
        dtype=dtype,
        attn_implementation="eager",
        use_safetensors=True,
        trust_remote_code=False,
        local_files_only=True,
        output_loading_info=True,
    )
    name = found.kind.__name__
    weights, names = StoredLinears({}, frozenset())
    if found.stored is not None:
        weights, names = read_stored(found.folder, model, found.stored)
    if missing := {*info["missing_keys"]} - names:
        raise ModelError(f"{found.folder} lacks {listed(missing)}")
    unexpected = {each for each in info["unexpected_keys"] if not each.endswith(_HARMLESS)} - names
    if unexpected:
        raise ModelError(f"{found.folder} has tensors that {name} does not use: {listed(unexpected)}")
    return model.eval(), weights


def _plain_logits(model: Any, tokens: Tensor) -> Tensor:
    """What the model itself computes for a row: float32 [T, vocab]."""
    logits: Tensor = model(input_ids=tokens[None].to(model.device), use_cache=False).logits[0]
    return logits.float()


def _record(model: AdoptedModel, tokens: Tensor, longest: int) -> list[Layer]:
    recording = Recording(longest)
    with heard_by(recording), torch.inference_mode():
        model.states(tokens, torch.arange(len(tokens), device=tokens.device))
    layers = recording.layers
    if not layers:
        raise ModelError("its layers do not take the attention of the engine")
    modules = [id(layer.module) for layer in layers]
    if len({*modules}) != len(modules):
        raise ModelError("a layer attends more than once")
    return layers


def _special(config: Any) -> list[int]:
    """Token ids with a meaning of their own, such as images."""
    fields = json.loads(json.dumps(config.to_dict(), default=str))
    return [
        token
        for part in (fields, *(part for part in fields.values() if isinstance(part, dict)))
        for name, value in part.items()
        if name.endswith(("token_id", "token_index", "token_ids"))
        for token in (value if isinstance(value, list) else [value])
        if isinstance(token, int)
    ]


@contextlib.contextmanager
def _named(kind: str, what: str) -> Iterator[None]:
    """Turn whatever another library raises into a refusal that names the model."""
    try:
        yield
    except ModelError as error:
        raise _refused(kind, str(error)) from error
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise _refused(kind, f"{what}: {_first_line(error)}") from error


def _refused(kind: str, why: str) -> ModelError:
    return ModelError(f"{kind} on --model-impl transformers: {why}")


def _first_line(error: Exception) -> str:
    line = str(error).strip().partition("\n")[0][:200]
    return line or type(error).__name__


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the warnings and progress bars of transformers."""
    from transformers.utils import logging as theirs

    level, bar = theirs.get_verbosity(), theirs.is_progress_bar_enabled()
    theirs.set_verbosity(logging.ERROR)
    theirs.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        theirs.set_verbosity(level)
        if bar:
            theirs.enable_progress_bar()  # type: ignore[no-untyped-call]
