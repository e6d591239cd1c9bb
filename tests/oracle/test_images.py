"""Prompts with images: answers through the whole engine equal those of transformers' whole models."""

from __future__ import annotations

import asyncio
import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from torch import Tensor

from headrace.compute.batch import Features
from headrace.compute.images import slots
from headrace.compute.images.families import FAMILIES
from headrace.config import ImageOptions, ModelOptions, Options
from headrace.core.events import Admitted, Emitted, Preempted, Verified
from headrace.core.request import Request, SamplingParams
from headrace.llm import LLM
from headrace.service.images import Placed
from headrace.testing.engines import Record, drain
from headrace.text.images import BadPicture, Picture
from headrace.wiring.images import ModelImages, make_images
from headrace.wiring.loading.images import open_images
from headrace.wiring.loading.text import load_text
from tests.api.image_text import Given
from tests.oracle.tiny import Tiny, build

WORDS = 150
IMAGE = 255
QWEN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
PLACEHOLDERS = {"internvl": "<IMG_CONTEXT>", "mistral3": "[IMG]"} | dict.fromkeys(QWEN, "<|image_pad|>")
START, END = 254, 253
SIDE = {"height": 28, "width": 28}
SPLIT = {"size": {"longest_edge": 56}, "max_image_size": {"longest_edge": 28}}
PROCESSORS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gemma3": ("gemma3", "Gemma3ImageProcessorPil", {"size": {"height": 56, "width": 56}}),
    "gemma4": ("gemma4", "Gemma4ImageProcessorPil", {"patch_size": 14, "max_soft_tokens": 70}),
    "idefics3": ("idefics3", "Idefics3ImageProcessorPil", SPLIT),
    "internvl": ("got_ocr2", "GotOcr2ImageProcessorPil", {"size": SIDE}),
    "llava": ("llava", "LlavaImageProcessorPil", {"size": {"shortest_edge": 28}, "crop_size": SIDE}),
    "llava_next": (
        "llava_next",
        "LlavaNextImageProcessorPil",
        {
            "size": {"shortest_edge": 28},
            "crop_size": SIDE,
            "image_grid_pinpoints": [[28, 56], [56, 28], [56, 56]],
        },
    ),
    "llava_onevision": (
        "llava_onevision",
        "LlavaOnevisionImageProcessorPil",
        {"size": SIDE, "image_grid_pinpoints": [[28, 28], [28, 56], [56, 28], [56, 56]]},
    ),
    "mistral3": (
        "pixtral",
        "PixtralImageProcessorPil",
        {"size": {"longest_edge": 84}, "patch_size": {"height": 14, "width": 14}},
    ),
    "smolvlm": ("smolvlm", "SmolVLMImageProcessorPil", SPLIT),
    **dict.fromkeys(
        QWEN,
        (
            "qwen2_vl",
            "Qwen2VLImageProcessorPil",
            {"size": {"shortest_edge": 28 * 28, "longest_edge": 112 * 112}, "patch_size": 14},
        ),
    ),
}
OWN: dict[str, dict[str, Any]] = {
    kind: {
        "text_config": {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 1.0,
                "mrope_section": [2, 3, 3],
                "mrope_interleaved": True,
            }
        },
        "vision_config": {"deepstack_visual_indexes": [0, 1, 2]} if "vl" in kind else {},
    }
    for kind in QWEN[2:]
}
OWN["gemma3"] = {
    "image_token_index": 255,
    "boi_token_index": 254,
    "eoi_token_index": 253,
    "mm_tokens_per_image": 16,
    "vision_config": {"image_size": 56},
}
OWN["gemma4"] = {
    "image_token_id": 255,
    "boi_token_id": 254,
    "eoi_token_id": 253,
    "audio_config": None,
    "vision_config": {
        "model_type": "gemma4_vision",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "patch_size": 14,
    },
    "text_config": {"max_position_embeddings": 512},
}
OWN["gemma4 both ways"] = OWN["gemma4"] | {
    "text_config": {"max_position_embeddings": 512, "use_bidirectional_attention": "vision"}
}
"""Fields of configs whose defaults do not fit small heads."""
DRAFTS = '{"method": "ngram", "num_speculative_tokens": 3, "adaptive": false, "prompt_lookup_min": 1}'


GROUPS = {"gemma3": 3, "gemma4": 1.462}
"""How many times the blocks of a sequence are as many as those of one group of layers, about."""


def picture(number: int, width: int = 64, height: int = 80) -> Picture:
    generator = torch.Generator().manual_seed(number)
    pixels = torch.randint(0, 256, (3 * width * height,), generator=generator)
    return Picture.of(width, height, bytes(pixels.tolist()))


def processor_of(kind: str) -> Any:
    module, name, given = PROCESSORS[kind]
    found = importlib.import_module(f"transformers.models.{module}.image_processing_pil_{module}")
    return getattr(found, name)(**given)


def make(kind: str, folder: Path, own: str = "") -> Any:
    """A tiny model with its image processor and a tokenizer of words and special tokens."""
    model = build(kind, "image-text", Tiny(), OWN.get(own or kind, {}))
    if kind in ("llava_next", "llava_onevision"):
        model.config.image_grid_pinpoints = PROCESSORS[kind][2]["image_grid_pinpoints"]
    model.save_pretrained(folder)
    processor_of(kind).save_pretrained(folder)
    special = {PLACEHOLDERS.get(kind, "<image>"): IMAGE}
    rest = ["<img>", "</img>", "[IMG_BREAK]", "[IMG_END]", "<fake_token_around_image>", "<global-img>"]
    rest += [f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)]
    special |= {name: 200 + number for number, name in enumerate(rest)}
    special |= {"<start_of_image>": START, "<end_of_image>": END}
    vocabulary = {f"w{index}": index for index in range(WORDS)} | special
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special])
    words.save(str(folder / "tokenizer.json"))
    return model


def open_llm(folder: Path, **given: Any) -> LLM:
    return LLM(
        str(folder), **{"max_model_len": 120, "block_size": 4, "kv_cache_memory_bytes": "1MiB", **given}
    )


def placed(images: ModelImages, tokens: list[int], pictures: list[Picture]) -> Placed:
    return asyncio.run(images.place(tokens, [Given(each) for each in pictures], ""))


def prompts_of(images: ModelImages, kind: str) -> list[tuple[list[Picture], Placed]]:
    """Prompts with 0, 1, 1 and 3 images, of which some begin alike, with their images placed."""
    shared, image = list(range(11, 25)), START if kind == "gemma3" else IMAGE
    given: list[tuple[list[int], list[Picture]]] = [
        (shared, []),
        ([*shared, image, 5, 6], [picture(1)]),
        ([*shared, image, 5, 6], [picture(2)]),
        ([*shared, image, 9, image, 7, image, 8], [picture(1), picture(3, 40, 100), picture(2)]),
    ]
    return [(pictures, placed(images, tokens, pictures)) for tokens, pictures in given]


def answers(
    llm: LLM, prompts: list[tuple[list[Picture], Placed]], name: str = "", length: int = 12
) -> tuple[Record, list[str]]:
    """Compute all prompts at once, greedily with log-probabilities."""
    engine, record = llm.loaded.engine, Record()
    params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True, logprobs=0)
    names = [f"{name}{number}" for number in range(len(prompts))]
    for each, (_, placed) in zip(names, prompts, strict=True):
        engine.submit(Request(each, placed.tokens, params, images=placed.images), 0.0)
    drain(engine, record)
    return record, names


@torch.inference_mode()
def theirs(
    model: Any, kind: str, tokens: tuple[int, ...], said: list[int], pictures: list[Picture]
) -> Tensor:
    """The log-probabilities [S, vocab] of what was ``said`` after a prompt with all its images, by the whole model."""
    from PIL import Image

    inputs: dict[str, Any] = {}
    if pictures:
        images: Any = [Image.frombytes("RGB", each[:2], each.pixels) for each in pictures]
        family = FAMILIES[kind]
        options = family.options(model.config)
        inputs = processor_of(kind)([images] if family.nested else images, return_tensors="pt", **options)
        wanted = (
            "pixel_values",
            "pixel_attention_mask",
            "image_sizes",
            "image_grid_thw",
            "image_position_ids",
            "batch_num_images",
        )
        inputs = {name: value for name, value in inputs.items() if name in wanted}
        for name in ("mm_token_type_ids", "token_type_ids"):
            if name in inspect.signature(model.forward).parameters:
                inputs[name] = (torch.tensor([tokens]) == IMAGE).int()
    if hasattr(model.model, "rope_deltas"):
        model.model.rope_deltas = None  # those of the prompt before
    first = model(input_ids=torch.tensor([tokens]), use_cache=True, **inputs)
    rest = model(input_ids=torch.tensor([said]), cache=first.cache, use_cache=True)
    logits = torch.cat([first.logits[0, -1:], rest.logits[0, :-1]])
    return logits.float().log_softmax(-1)


def check(model: Any, kind: str, prompts: list[tuple[list[Picture], Placed]], record: Record) -> None:
    for number, (pictures, placed) in enumerate(prompts):
        events = [each for each in record.of(Emitted) if each.request_id.endswith(str(number))]
        said = [token for event in events for token in event.tokens]
        scores = [each.logprob for event in events for each in event.logprobs]
        expected = theirs(model, kind, placed.tokens, said, pictures)
        assert len(said) == len(scores) >= 12
        own = expected.gather(1, torch.tensor(said)[:, None])[:, 0]
        assert (expected.max(1).values - own).max() < 1e-4, "another token is likelier"
        torch.testing.assert_close(torch.tensor(scores), own, rtol=0, atol=1e-3)


@pytest.mark.parametrize("own", [*FAMILIES, "gemma4 both ways"])
def test_answers_equal_those_of_the_whole_model(own: str, tmp_path: Path) -> None:
    kind = own.partition(" ")[0]
    model = make(kind, tmp_path, own)
    sizes = {"max_model_len": 300, "kv_cache_memory_bytes": "2MiB"} if kind == "gemma4" else {}
    tokens = 96 if kind == "gemma4" else 24
    with open_llm(tmp_path, max_num_batched_tokens=tokens, max_num_seqs=8, **sizes) as llm:
        images = make_images(llm.loaded.images)
        assert images is not None, llm.loaded.images.why
        prompts = prompts_of(images, kind)
        record, _ = answers(llm, prompts)
        check(model, kind, prompts, record)
        # Again: everything is in the prefix cache, and no image is encoded a second time.
        seconds = images.counts().seconds
        again, names = answers(llm, prompts_of(images, kind), "again")
        check(model, kind, prompts, again)
        cached = {event.request_id: event.cached_tokens for event in again.of(Admitted)}
        # Recurrent states and window groups are found at the ends of blocks only.
        missed = 4 if kind.startswith(("qwen3_5", "gemma")) else 1
        assert all(
            cached[name] >= len(placed.tokens) - missed
            for name, (_, placed) in zip(names, prompts, strict=True)
        )
        assert images.counts().seconds == seconds
        hits = 5 if FAMILIES[kind].tiled_alone else 7  # where two of the images are encoded in two ways
        assert (images.cache.queries, images.cache.hits) == (10, hits)
        assert images.cache.nbytes < llm.loaded.ledger.weight_bytes
        block = llm.loaded.ledger.block_bytes
        images.close()
    # Few blocks, drafts, and steps that overlap.
    length = 40 if kind == "gemma4" else 12
    longest = max(len(placed.tokens) for _, placed in prompts) + length
    given = {
        "max_model_len": longest,
        "kv_cache_memory_bytes": str(int((-(-longest // 4) + 1) * block * GROUPS.get(kind, 1))),
        "scheduling_policy": "fcfs",
        "speculative_config": DRAFTS,
        "overlap": 1,
    }
    with open_llm(tmp_path, max_num_batched_tokens=tokens + 8, max_num_seqs=8, **given) as llm:
        record, _ = answers(llm, 2 * prompts, length=length)
        check(model, kind, 2 * prompts, record)
        assert record.of(Preempted)
        assert record.of(Verified)


def test_placeholders_and_pictures_must_be_as_many(tmp_path: Path) -> None:
    make("llava", tmp_path)
    with open_llm(tmp_path) as llm:
        images = make_images(llm.loaded.images)
        assert images is not None
        with pytest.raises(BadPicture, match="2 placeholders of images for 1 images"):
            placed(images, [1, IMAGE, 2, IMAGE], [picture(1)])
        images.close()


def test_images_are_refused_where_they_are_computed_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text is served all the same."""
    make("llava", tmp_path)

    def twice(places: Tensor, rows: Tensor, deep: Tensor | None) -> Features:
        return Features(places, 2 * rows, deep)

    monkeypatch.setattr(slots, "Features", twice)
    with open_llm(tmp_path) as llm:
        assert make_images(llm.loaded.images) is None
        assert "computed otherwise than by transformers" in llm.loaded.images.why
        assert llm.loaded.images.why in llm.loaded.notes
        record, _ = answers(llm, [([], Placed((1, 2, 3), ()))])
        assert len(record.tokens["0"]) == 12


@pytest.mark.parametrize(("kind", "part"), [("gemma3", "_cut"), ("qwen3_vl", "_turned")])
def test_causal_images_and_positions_of_text_are_refused(
    kind: str, part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the model attends both ways within an image, or rotates by rows and columns."""
    make(kind, tmp_path)
    monkeypatch.setattr(slots.SlotImages, part, lambda images, batch, rows: batch)
    with open_llm(tmp_path) as llm:
        assert "computed otherwise than by transformers" in llm.loaded.images.why


def test_an_image_must_fit_into_a_step(tmp_path: Path) -> None:
    make("gemma3", tmp_path)
    with open_llm(tmp_path, max_num_batched_tokens=15, max_num_seqs=4) as llm:
        assert "up to 16 positions of an image at once" in llm.loaded.images.why
        assert "--max-num-batched-tokens 15" in llm.loaded.images.why


def test_a_type_that_is_not_supported_is_named(tmp_path: Path) -> None:
    kind = "llava"
    make(kind, tmp_path)
    with open_llm(tmp_path, max_model_len=16) as llm:
        assert "--max-model-len 16 has no room" in llm.loaded.images.why
    model = build("idefics2", "image-text", Tiny())
    model.save_pretrained(tmp_path)
    with open_llm(tmp_path) as llm:
        assert llm.loaded.images.why.startswith("images of models of type idefics2 are not supported")


def test_no_encoder_is_loaded_where_no_image_is_allowed(tmp_path: Path) -> None:
    make("llava", tmp_path)
    options = Options(
        model=ModelOptions(model=str(tmp_path)), images=ImageOptions(limit_mm_per_prompt="image=0")
    )
    loaded: Any = None  # nothing of the text model is needed for the decision
    opened = open_images(options, load_text(options.model, "auto"), loaded, 64)
    assert opened.encoder is None
    assert opened.why == "images are switched off by --limit-mm-per-prompt"


@pytest.mark.parametrize("kind", ["idefics3", "llava", "llava_next"])
def test_prompts_are_those_of_the_processors(kind: str, tmp_path: Path) -> None:
    """The other types have processors that need torchvision."""
    from PIL import Image
    from transformers import PreTrainedTokenizerFast

    model = make(kind, tmp_path)
    name = {"idefics3": "Idefics3Processor", "llava": "LlavaProcessor", "llava_next": "LlavaNextProcessor"}[
        kind
    ]
    given: dict[str, Any] = {"patch_size": 14, "vision_feature_select_strategy": "default"}
    given |= {"num_additional_image_tokens": 1}
    if kind == "idefics3":
        given = {"image_seq_len": 1}
    words = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    processor = getattr(transformers, name)(image_processor=processor_of(kind), tokenizer=words, **given)
    pictures = [picture(1), picture(2, 30, 100)]
    images = [Image.frombytes("RGB", each[:2], each.pixels) for each in pictures]
    text = "w1 <image> w2 w3 <image> w4"
    expected = processor(text=text, images=images, return_tensors="pt").input_ids[0].tolist()
    with open_llm(tmp_path) as llm:
        placing = make_images(llm.loaded.images)
        assert placing is not None
        found = placed(placing, [1, IMAGE, 2, 3, IMAGE, 4], pictures)
        placing.close()
    assert list(found.tokens) == expected
    assert model.config.image_token_id == IMAGE


def test_an_image_in_tiles_and_as_one_square_share_no_block(tmp_path: Path) -> None:
    """An image that is alone in its prompt has other rows than one of several: their digests differ."""
    make("llava_onevision", tmp_path)
    with open_llm(tmp_path) as llm:
        images = make_images(llm.loaded.images)
        assert images is not None
        alone = placed(images, [1, IMAGE, 2], [picture(1)])
        several = placed(images, [1, IMAGE, 2, IMAGE], [picture(1), picture(2)])
        images.close()
    assert alone.images[0].digest != several.images[0].digest
    assert (alone.images[0].length, several.images[0].length) == (24, 5)
