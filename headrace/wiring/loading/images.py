"""Opens what encodes the images of a loaded model, or says why the model takes none."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from headrace.compute.checkpoint import ModelError
from headrace.compute.images.cache import ImageCache
from headrace.compute.images.families import FAMILIES
from headrace.compute.model.decoder import Decoder
from headrace.compute.model.gguf.file import is_gguf
from headrace.compute.model.hub import read_config
from headrace.config import Options, image_limit
from headrace.wiring.loading.computing import Computing
from headrace.wiring.loading.text import ModelText

if TYPE_CHECKING:
    from headrace.compute.images.encoder import ImageEncoder
    from headrace.wiring.remote_images import RemoteEncoding

TEXT_ONLY = "the model takes text only"


class OpenImages(NamedTuple):
    """The image encoder of a model and the cache of what it encoded; without them, ``why`` it takes no images.

    ``remote`` is in place of an encoder where an engine process has it.
    """

    encoder: ImageEncoder | None = None
    cache: ImageCache | None = None
    why: str = TEXT_ONLY
    remote: RemoteEncoding | None = None


NO_IMAGES = OpenImages()


def open_images(options: Options, text: ModelText, computing: Computing, batched_tokens: int) -> OpenImages:
    """The image encoder of a loaded model, if its type is supported and it computes what transformers does; a
    step has at most ``batched_tokens``.
    """
    if is_gguf(text.path):
        return NO_IMAGES
    config: dict[str, Any] = read_config(text.path)
    if config.get("vision_config") is None:
        return NO_IMAGES
    if image_limit(options.images.limit_mm_per_prompt) == 0:
        return OpenImages(why="images are switched off by --limit-mm-per-prompt")
    kind, model, decoder = config.get("model_type"), options.model, computing.decoder
    if kind not in FAMILIES:
        return OpenImages(why=f"images of models of type {kind} are not supported; the model takes text only")
    if computing.leader is not None:
        return OpenImages(why="images are not supported with several ranks; the server takes text only")
    if not isinstance(decoder, Decoder):
        return OpenImages(
            why="images are not supported where transformers' code computes the text; the server takes text only"
        )
    from headrace.compute.images.loading import TextTokens, load_images

    tokens = TextTokens(partial(text.tokenizer.encode, add_special_tokens=False), text.tokenizer.token)
    try:
        encoder = load_images(
            text.path,
            decoder,
            tokens,
            computing.max_model_len,
            batched_tokens=batched_tokens,
            rounded=bool(model.quantization),
            dummy_seed=model.seed if model.load_format == "dummy" else None,
        )
    except ModelError as error:
        return OpenImages(why=f"images are refused, and the server takes text only: {error}")
    return OpenImages(encoder, ImageCache(options.images.cache_bytes), "")
