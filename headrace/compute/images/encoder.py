"""The processor, vision tower and projector of a model, as transformers computes them: pixels to rows and tokens."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from mmap import mmap
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.compute.adopted.modules import held_bytes
from headrace.compute.images.cache import EncodedImage, ImageKeys
from headrace.compute.images.families import ImageFamily, Processed, UnusableImage
from headrace.compute.images.slots import ImageRows

_NOT_FOR_THE_MODEL = ("rows", "cols", "num_patches")
"""What processors return for texts only."""
_OF_EACH = ("pixel_values", "image_sizes")
"""What processors that make tiles return for each image."""


class ImageEncoder:
    """Encodes one image a call, on any thread. ``most_joint`` positions of one attend to each other at most.

    Args:
        model: a model of transformers, of which only what computes images is used.
        processor: its image processor.
        family: how the processor is called, and what stands for an image.
        image_token: the id of the placeholder in prompts, at whose positions rows stand.
        tokens_of: turns a text into token ids; special tokens in it are read as such.
        named: the text of a special token.
        settings: a digest of all that the rows depend on beside the pixels.
    """

    def __init__(
        self,
        model: Any,
        processor: Any,
        family: ImageFamily,
        image_token: int,
        tokens_of: Callable[[str], Sequence[int]],
        named: Callable[[int], str],
        settings: bytes,
    ) -> None:
        self._model = model
        self._processor = processor
        self._family = family
        self._tokens_of = tokens_of
        self._token, self._named = named(image_token), named
        self.most_joint = family.joint(model.config, processor)
        self._takes = {*inspect.signature(model.model.get_image_features).parameters}
        self.image_token = image_token
        self.keys = ImageKeys(getattr(model.config, family.placeholder), settings, family.tiled_alone)
        self.nbytes = held_bytes(model)

    def measure(self) -> None:
        """Parts of the model have been dropped: ``nbytes`` is what is left."""
        self.nbytes = held_bytes(self._model)

    def inputs(
        self, width: int, height: int, pixels: bytes | bytearray | mmap, several: bool = False
    ) -> Mapping[str, Any]:
        """What the processor makes of an image, alone in its prompt or one of ``several``.

        Raises:
            UnusableImage: it refuses the image.
        """
        from PIL import Image

        image: Any = Image.frombytes("RGB", (width, height), memoryview(pixels))
        family, options = self._family, self._family.options(self._model.config)
        images = [image, Image.new("RGB", (1, 1))] if several and family.tiled_alone else [image]
        try:
            given = [images] if family.nested else images
            found: Mapping[str, Any] = self._processor(given, return_tensors="pt", **options)
        except Exception as error:  # whatever an image makes another library raise
            raise UnusableImage(f"the model's processor refuses it: {str(error)[:200]}") from error
        # The number of images stays, so that the model makes no tiles either.
        return found if len(images) == 1 else {**found, **{name: found[name][:1] for name in _OF_EACH}}

    @torch.inference_mode()
    def encoded(self, inputs: Mapping[str, Any]) -> EncodedImage:
        """The tokens and features of a processed image.

        Raises:
            UnusableImage: the encoder refuses it.
        """
        rows, deep = self._rows(inputs)
        processed = Processed(inputs, len(rows), self._token, self._model.config, self._named)
        text, grid = self._family.text(processed), self._family.grid
        tokens = tuple(self._tokens_of(text))
        offsets = np.flatnonzero(np.array(tokens, dtype=np.int64) == self.image_token)
        if len(offsets) != len(rows):
            raise UnusableImage(f"the model computes {len(rows)} rows for {len(offsets)} positions")
        joint = (0, 0)
        if self.most_joint:
            joint = int(offsets[0]), int(offsets[-1]) + 1
        return EncodedImage(tokens, ImageRows(rows, offsets, deep, grid(processed) if grid else None), joint)

    def _rows(self, inputs: Mapping[str, Any]) -> tuple[Tensor, Tensor | None]:
        """The rows in place of embeddings, and those behind layers, if there are any."""
        model = self._model
        given = {name: value for name, value in inputs.items() if name not in _NOT_FOR_THE_MODEL}
        given = {
            name: value.to(model.device, model.dtype if value.is_floating_point() else None)
            for name, value in given.items()
            if name in self._takes
        }
        try:
            found = model.get_image_features(**given, return_dict=True)
            parts = [found.pooler_output, *(getattr(found, "deepstack_features", None) or ())]
            rows = torch.stack([_joined(part) for part in parts]).to(model.dtype)
        except torch.OutOfMemoryError:
            raise UnusableImage("it is too large for the memory of the device") from None
        except (RuntimeError, ValueError, IndexError) as error:
            raise UnusableImage(f"the model's encoder refuses it: {str(error)[:200]}") from error
        if not torch.isfinite(rows).all():
            raise UnusableImage("the model's encoder computes values that are not finite")
        return rows[0], rows[1:] if len(rows) > 1 else None


def _joined(found: Any) -> Tensor:
    """The rows [N, hidden] of one tensor, or of one for each part of an image."""
    parts = found if isinstance(found, list | tuple) else [found]
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])
