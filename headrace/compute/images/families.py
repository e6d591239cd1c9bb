"""The types of models whose images are supported: how an image is processed, and what stands for it in a prompt.

A new type is an entry of `FAMILIES`; `loading` checks it at start, and
`tests/oracle/test_images.py` compares it with transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from headrace.compute.checkpoint import ModelError


class UnusableImage(ValueError):
    """An image that a model's processor or encoder refuses, and why."""


class Processed(NamedTuple):
    """A processed image: what the processor returned, and the number of ``rows`` that the model computed from it.

    ``token`` is the text of the token at whose positions the rows stand, ``config`` that of the model. ``named(id)`` is
    the text of another special token.
    """

    inputs: Mapping[str, Any]
    rows: int
    token: str
    config: Any
    named: Callable[[int], str]


@dataclass(frozen=True, slots=True)
class ImageFamily:
    """``text`` is what replaces the placeholder of an image in a prompt; ``options(config)`` are those of its
    processor. With ``nested`` the processor takes a list of images for each prompt, and with ``tiled_alone`` it makes
    tiles of an image that is alone in its prompt, but one square of each of several. ``grid`` are the rows and columns
    of positions of an image, in a model whose rotations distinguish them (M-RoPE). ``joint(config, processor)`` is the
    most positions of an image that attend to each other both ways. ``placeholder`` is the field of the config with the
    token that stands for an image in the prompt of a chat template.
    """

    text: Callable[[Processed], str]
    options: Callable[[Any], Mapping[str, Any]] = field(default=lambda config: {})
    nested: bool = False
    tiled_alone: bool = False
    grid: Callable[[Processed], tuple[int, int]] | None = None
    joint: Callable[[Any, Any], int] = lambda config, processor: 0
    placeholder: str = "image_token_id"


def _repeated(image: Processed) -> str:
    return image.token * image.rows


def _between_tags(image: Processed) -> str:
    return f"<img>{image.token * image.rows}</img>"


def _tiles(image: Processed) -> str:
    """Tiles by row and column, then the whole image; or only that."""
    rows, columns = image.inputs["rows"][0][0], image.inputs["cols"][0][0]
    each = image.token * (image.rows // (rows * columns + 1))
    fence = "<fake_token_around_image>"
    text = "".join(
        "".join(f"{fence}<row_{row + 1}_col_{column + 1}>{each}" for column in range(columns)) + "\n"
        for row in range(rows)
    )
    return f"{text}\n{fence}<global-img>{each}{fence}" if rows else f"{fence}<global-img>{each}{fence}"


def _lines(image: Processed) -> str:
    """The patches line by line, with a token behind each line."""
    height, width = (int(size) // _merged_patch(image.config) for size in image.inputs["image_sizes"][0])
    return "[IMG_BREAK]".join([image.token * width] * height) + "[IMG_END]"


def _merged_patch(config: Any) -> int:
    size: int = config.vision_config.patch_size * getattr(config, "spatial_merge_size", 1)
    return size


def _merged_grid(image: Processed) -> tuple[int, int]:
    merged = image.config.vision_config.spatial_merge_size
    _, rows, columns = image.inputs["image_grid_thw"][0].tolist()
    return rows // merged, columns // merged


def _soft_tokens_both_ways(config: Any, processor: Any) -> int:
    both_ways = config.get_text_config().use_bidirectional_attention == "vision"
    most: int = processor.max_soft_tokens
    return most if both_ways else 0


_TILED = ImageFamily(_tiles, lambda config: {"return_row_col_info": True}, nested=True)
_LINED = ImageFamily(_lines, lambda config: {"patch_size": _merged_patch(config)})


def _between_named(image: Processed) -> str:
    config = image.config
    return f"{image.named(config.boi_token_id)}{image.token * image.rows}{image.named(config.eoi_token_id)}"


def _on_lines(image: Processed) -> str:
    return f"\n\n{_between_named(image)}\n\n"


_IN_GRID = ImageFamily(_repeated, grid=_merged_grid)

FAMILIES: Mapping[str, ImageFamily] = {
    "gemma3": ImageFamily(
        _on_lines,
        lambda config: {"do_pan_and_scan": False},
        nested=True,
        joint=lambda config, processor: config.mm_tokens_per_image,
        placeholder="boi_token_id",
    ),
    "gemma4": ImageFamily(
        _between_named,
        nested=True,
        joint=_soft_tokens_both_ways,
    ),
    "idefics3": _TILED,
    "internvl": ImageFamily(_between_tags, lambda config: {"crop_to_patches": True}),
    "llava": ImageFamily(_repeated),
    "llava_next": ImageFamily(_repeated, lambda config: {"do_pad": True}),
    "llava_onevision": ImageFamily(_repeated, nested=True, tiled_alone=True),
    "mistral3": _LINED,
    "qwen2_5_vl": _IN_GRID,
    "qwen2_vl": _IN_GRID,
    "qwen3_5": _IN_GRID,
    "qwen3_5_moe": _IN_GRID,
    "qwen3_vl": _IN_GRID,
    "qwen3_vl_moe": _IN_GRID,
    "smolvlm": _TILED,
}
"""The supported types of models, by the ``model_type`` of their configs."""


def family_of(config: Any) -> ImageFamily:
    """The family of a config.

    Raises:
        ModelError: its images are not supported.
    """
    if config.model_type not in FAMILIES:
        raise ModelError(f"images of models of type {config.model_type} are not supported")
    pixtral = config.model_type == "llava" and config.vision_config.model_type == "pixtral"
    return _LINED if pixtral else FAMILIES[config.model_type]
