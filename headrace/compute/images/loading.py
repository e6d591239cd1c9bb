"""Loads what computes the images of a model, and checks a prompt with an image against transformers.

The class that transformers has for the model is loaded with the first layers of its text model only, up to one with
attention. Their states for a prompt with an image are compared with those that the loaded decoder computes in chunks
over pages. Then the text model is dropped.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from headrace.compute.adopted.agreement import TOLERANCE
from headrace.compute.adopted.loading import class_of, quiet, read_class_config
from headrace.compute.batch import Batch, Taps
from headrace.compute.checkpoint import ModelError, listed
from headrace.compute.images.cache import EncodedImage
from headrace.compute.images.encoder import ImageEncoder
from headrace.compute.images.families import UnusableImage, family_of
from headrace.compute.images.products import use_kernels
from headrace.compute.images.slots import SlotImages
from headrace.compute.model.decoder import ModelDecoder
from headrace.compute.model.kv import PagedKV
from headrace.compute.model.weights import digest
from headrace.compute.slots import Rows
from headrace.core.images import DIGEST_BYTES, ImageSpan
from headrace.core.plan import Entry
from headrace.core.request import SamplingParams

CHECKED_LAYERS = 2
"""Layers of the text model that are compared at start, and all up to the first one with attention."""

_ROUNDED = 0.6
"""The tolerance where the decoder's weights are quantized and those of transformers are not."""
_BLOCK = 16
_WIDTH, _HEIGHT = 96, 64
_GIVEN = (
    *("pixel_values", "pixel_attention_mask", "image_sizes", "image_grid_thw", "image_position_ids"),
    "batch_num_images",
)
"""What models take of a processor's results."""
_AROUND = 7
"""Tokens before and behind the image of the check."""


class TextTokens(NamedTuple):
    """What images need of a tokenizer: texts to token ids, and the text of a special token (None: there is none)."""

    ids: Callable[[str], Sequence[int]]
    text: Callable[[int], str | None]


def load_images(
    folder: Path,
    decoder: ModelDecoder,
    tokens: TextTokens,
    max_model_len: int,
    *,
    batched_tokens: int,
    rounded: bool,
    dummy_seed: int | None = None,
) -> ImageEncoder:
    """The image encoder of the model in a folder, whose text is computed by ``decoder``.

    A step has at most ``batched_tokens``. ``rounded``: its weights are quantized. With ``dummy_seed`` all weights are
    random, and nothing is compared.

    Raises:
        ModelError: images of the model are not supported, or the computation differs from transformers'.
    """
    config = read_class_config(folder)
    family = family_of(config)
    if getattr(config, "quantization_config", None) or getattr(
        config.get_text_config(), "quantization_config", None
    ):
        raise ModelError("images of checkpoints that are stored quantized are not supported")
    image_token = config.image_token_id

    def named(token: int) -> str:
        text = tokens.text(token)
        if text is None:
            raise ModelError(f"the tokenizer has no token {token}, which stands for images")
        return text

    processor = _processor(folder)
    model = _model(folder, config, decoder, dummy_seed)
    settings = _settings(model, processor, config)
    encoder = ImageEncoder(model, processor, family, image_token, tokens.ids, named, settings)
    if encoder.most_joint > batched_tokens:
        raise ModelError(
            f"a step computes up to {encoder.most_joint} positions of an image at once; --max-num-batched-tokens "
            f"{batched_tokens} has no room for them"
        )
    example = None if dummy_seed is not None else _example(encoder, model, max_model_len)
    _drop_text(model)
    if decoder.device.type == "cpu":
        use_kernels(model, decoder.kernels)
    encoder.measure()
    if example is not None:
        _check(encoder, decoder, example, rounded=rounded)
    return encoder


def _processor(folder: Path) -> Any:
    try:
        import PIL  # noqa: F401
    except ModuleNotFoundError as error:
        raise ModelError(
            "Pillow is not installed; install it with: pip install 'headrace[images]'"
        ) from error
    from transformers import AutoImageProcessor

    try:
        with quiet():
            return AutoImageProcessor.from_pretrained(  # type: ignore[no-untyped-call]
                str(folder), backend="pil", local_files_only=True, trust_remote_code=False
            )
    except Exception as error:  # whatever a config makes another library raise
        raise ModelError(f"its image processor cannot be read: {_line(error)}") from error


def _model(folder: Path, config: Any, decoder: ModelDecoder, dummy_seed: int | None) -> Any:
    """The model of transformers with the first layers of its text model."""
    kind, text = class_of(config), config.get_text_config()
    kinds = getattr(text, "layer_types", None) or []
    recurrent = next((number for number, each in enumerate(kinds) if each != "linear_attention"), 0)
    layers = min(max(CHECKED_LAYERS, recurrent + 1), text.num_hidden_layers)
    try:
        with quiet():
            if dummy_seed is not None:
                return _random_model(kind, config, layers, decoder, dummy_seed)
            model, info = _shortened(kind, layers).from_pretrained(
                str(folder),
                config=copy.deepcopy(config),
                dtype=decoder.dtype,
                attn_implementation="eager",
                use_safetensors=True,
                trust_remote_code=False,
                local_files_only=True,
                output_loading_info=True,
            )
    except Exception as error:  # whatever a checkpoint makes another library raise
        raise ModelError(f"its image encoder cannot be loaded: {_line(error)}") from error
    if info["missing_keys"]:
        raise ModelError(f"{folder} lacks {listed(info['missing_keys'])}")
    return model.eval().to(decoder.device)


def _shortened(kind: Any, layers: int) -> Any:
    """A class whose models keep so many layers of their text model: weights of the others are not read.

    The config stays, because tensors of all layers may depend on it (inputs of each layer in Gemma 4).
    """

    class Shortened(kind):  # type: ignore[misc]
        def __init__(self, config: Any, *given: Any, **named: Any) -> None:
            super().__init__(config, *given, **named)
            text = self.get_decoder()
            text.layers = text.layers[:layers]

    # transformers finds the names of tensors in files by these two.
    Shortened.__name__, Shortened.__module__ = kind.__name__, kind.__module__
    return Shortened


def _random_model(kind: Any, config: Any, layers: int, decoder: ModelDecoder, seed: int) -> Any:
    short = copy.deepcopy(config)
    text = short.get_text_config()
    text.num_hidden_layers = layers
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:layers]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        made = kind._from_config(short, dtype=decoder.dtype, attn_implementation="eager")
    return made.eval().to(decoder.device)


def _drop_text(model: Any) -> None:
    """Free the text model and the head."""
    body, text = model.model, model.get_decoder()
    for parent in (model, body):
        for name, child in list(parent.named_children()):
            if child is text or child is model.lm_head:
                setattr(parent, name, nn.Identity())


def _settings(model: Any, processor: Any, config: Any) -> bytes:
    """A digest of all that the rows of an image depend on beside its pixels."""
    text = {id(each) for each in model.get_decoder().parameters()} | {id(model.lm_head.weight)}
    weights = digest("", (each for each in model.parameters() if id(each) not in text))
    described = processor.to_dict(), config.to_dict(), version("transformers"), str(model.dtype), weights
    return hashlib.sha256(json.dumps(described, sort_keys=True, default=str).encode()).digest()


def _line(error: Exception) -> str:
    return (str(error).strip().partition("\n")[0] or type(error).__name__)[:200]


# The check at start.


class _Example(NamedTuple):
    """A prompt with an image: its ``tokens``, what the processor made of the image, and the ``states`` [T, hidden] that
    transformers' first ``layers`` compute for it.
    """

    tokens: Sequence[int]
    inputs: Mapping[str, Any]
    states: Tensor
    layers: int


def _example(encoder: ImageEncoder, model: Any, max_model_len: int) -> _Example:
    """A prompt with a small image, computed by the modules of transformers.

    Raises:
        ModelError: they refuse it, or it does not fit into the context.
    """
    pixels = torch.randint(0, 256, (_WIDTH * _HEIGHT * 3,), generator=torch.Generator().manual_seed(0))
    try:
        inputs = encoder.inputs(_WIDTH, _HEIGHT, bytes(pixels.tolist()))
        image = encoder.encoded(inputs)
    except UnusableImage as error:
        raise ModelError(f"an image of {_WIDTH}x{_HEIGHT} pixels: {error}") from error
    drawn = torch.randint(
        encoder.image_token or 1, (2 * _AROUND,), generator=torch.Generator().manual_seed(1)
    )
    before, behind = drawn[:_AROUND].tolist(), drawn[_AROUND:].tolist()
    tokens = [*before, *image.tokens, *behind]
    if len(tokens) > max_model_len:
        raise ModelError(
            f"a small image takes {len(image.tokens)} tokens, which --max-model-len {max_model_len} has no room for"
        )
    return _Example(tokens, inputs, _their_states(model, tokens, inputs), len(model.get_decoder().layers))


def _check(encoder: ImageEncoder, decoder: ModelDecoder, example: _Example, *, rounded: bool) -> None:
    """Compare the states of the first layers for a prompt with an image, which the kernels encode.

    Raises:
        ModelError: they differ.
    """
    try:
        image = encoder.encoded(example.inputs)
    except UnusableImage as error:
        raise ModelError(f"the kernels encode an image: {error}") from error
    layers, theirs = example.layers, example.states
    if image.features.deep is not None and len(image.features.deep) >= decoder.shape.num_layers:
        raise ModelError("rows of images are added behind all layers; they must be fewer than the layers")
    ours = _our_states(decoder, example.tokens, image, layers)
    apart = (ours - theirs) / theirs.std().clamp_min(1e-6)
    exact = decoder.dtype == torch.float32 and not rounded
    worst = float(apart.abs().max() if exact else apart.square().mean(-1).sqrt().median())
    limit = _ROUNDED if rounded else TOLERANCE[decoder.dtype]
    if not worst <= limit:
        raise ModelError(
            f"a prompt with an image is computed otherwise than by transformers: states of layer {layers} differ by"
            f" {worst:.2g} of their spread"
        )


@torch.inference_mode()
def _their_states(model: Any, tokens: Sequence[int], inputs: Mapping[str, Any]) -> Tensor:
    """The states [T, hidden] behind the last layer of the shortened text model."""
    found: list[Tensor] = []

    def note(module: nn.Module, given: tuple[Tensor, ...]) -> None:
        found.append(given[0])

    hook = model.get_decoder().norm.register_forward_pre_hook(note)
    given = {
        name: value.to(model.device, model.dtype if value.is_floating_point() else None)
        for name, value in inputs.items()
        if isinstance(value, Tensor) and name in _GIVEN
    }
    row = torch.tensor([tokens], device=model.device)
    for name in ("mm_token_type_ids", "token_type_ids"):
        if name in inspect.signature(model.forward).parameters:
            given[name] = (row == model.config.image_token_id).int()
    try:
        model(input_ids=row, use_cache=False, **given)
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        raise ModelError(f"transformers cannot compute a prompt with an image: {_line(error)}") from error
    finally:
        hook.remove()
    return found[0].reshape(len(tokens), -1).float()


@torch.inference_mode()
def _our_states(decoder: ModelDecoder, tokens: Sequence[int], image: EncodedImage, layer: int) -> Tensor:
    """The decoder's states [T, hidden] before ``layer``, computed in three chunks over pages, two of which cut the
    image if its positions may be split.
    """
    kv = PagedKV(decoder.shape, -(-len(tokens) // _BLOCK), _BLOCK, decoder.dtype, decoder.device)
    if decoder.states is not None:  # until the memory has been sized
        decoder.states.allocate(1, 0, decoder.device)
    images = SlotImages(decoder.device, 1)
    span = ImageSpan(_AROUND, len(image.tokens), bytes(DIGEST_BYTES), image.features, image.joint)
    images.admit(Entry(0, "", tuple(tokens), len(tokens), SamplingParams(), 0, frozenset(), (), "", (span,)))
    cuts = [0, _AROUND + len(image.tokens) // 3, _AROUND + len(image.tokens) // 2 + 1, len(tokens)]
    if span.joint[1]:  # no step ends within it
        cuts = [0, _AROUND // 2, span.end, len(tokens)]
    parts = []
    for start, end in pairwise(cuts):
        batch = _chunk(tokens, start, end, kv)
        states = torch.empty(
            (end - start, decoder.shape.hidden_size), dtype=decoder.dtype, device=decoder.device
        )
        columns = ([0], [start], [end - start], [0], [0])
        batch = images.added(batch, Rows(*(np.array(each, dtype=np.int64) for each in columns)))
        batch = replace(batch, taps=Taps(states, np.array([layer], dtype=np.int64)))
        decoder.hidden(batch, kv)
        parts.append(states)
    return torch.cat(parts).float()


def _chunk(tokens: Sequence[int], start: int, end: int, kv: PagedKV) -> Batch:
    """Tokens [start, end) of one row in the blocks from 0 on."""
    device, length = kv.device, end - start
    positions = torch.arange(start, end, device=device)
    return Batch(
        tokens=torch.tensor(tokens[start:end], dtype=torch.int32, device=device),
        positions=positions,
        slot_mapping=positions.clone(),
        query_starts=torch.tensor([0, length], dtype=torch.int32, device=device),
        context_lens=torch.tensor([end], dtype=torch.int32, device=device),
        block_tables=torch.arange(kv.num_blocks, dtype=torch.int32, device=device)[None],
        logits_indices=torch.arange(length, device=device),
        lengths=(length,),
        contexts=(end,),
        decode_rows=int(length == 1),
        block_size=kv.block_size,
        slots=np.zeros(1, dtype=np.int64),
    )
