from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from headrace.compute.kernels import HeadShape
from headrace.compute.model.kv import PagedKV, bytes_per_block
from headrace.compute.model.shape import LayerGroups, LayerShape, ModelShape, gain, layer_groups
from headrace.core.capacity import WindowGroups
from tests.compute.model.test_kv import SPEC

HEADS = HeadShape(4, 2, 8)


def shape(layers: str, window: int = 16, **fields: object) -> ModelShape:
    """Layers by letter: F full, w with a window, s sharing the first one of these."""
    kinds = {"F": LayerShape(HEADS), "w": LayerShape(HEADS, window)}
    made = [replaced(kinds, layers, letter) for letter in layers]
    return replace(SPEC.shape, layers=tuple(made), **fields)  # type: ignore[arg-type]


def of(*layers: LayerShape) -> ModelShape:
    return replace(SPEC.shape, layers=layers)


def replaced(kinds: dict[str, LayerShape], layers: str, letter: str) -> LayerShape:
    return kinds["w"]._replace(shares=layers.index("w")) if letter == "s" else kinds[letter]


def groups_of(layers: str) -> LayerGroups:
    groups = layer_groups(shape(layers), 32)
    assert isinstance(groups, LayerGroups)
    return groups


def test_groups_have_as_many_layers_as_are_full() -> None:
    groups = groups_of("wwwwwFwwwwwFww")
    assert groups.group == (1, 1, 2, 2, 3, 0, 3, 4, 4, 5, 5, 0, 6, 6)
    assert groups.place == (0, 1, 0, 1, 0, 0, 1, 0, 1, 0, 1, 1, 0, 1)
    assert (groups.full, groups.limited, groups.windows) == (2, 2, WindowGroups(6, 16, 32))


def test_a_layer_that_shares_is_where_the_other_one_is() -> None:
    groups = groups_of("wFwsF")
    assert (groups.group, groups.place) == ((1, 0, 1, 1, 0), (0, 0, 1, 0, 1))


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (shape("FF"), "no layer has a window"),
        (shape("ww"), "all layers have a window"),
        (of(LayerShape(HEADS, 4), LayerShape(HEADS, 8), LayerShape(HEADS)), "different windows"),
        (of(LayerShape(HEADS, 4), LayerShape(HEADS), LayerShape(HeadShape(4, 1, 8))), "different shapes"),
        (shape("wF", state_bytes=8), "recurrent states"),
    ],
)
def test_models_without_groups(given: ModelShape, why: str) -> None:
    found = layer_groups(given, 32)
    assert isinstance(found, str)
    assert why in found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_blocks_of_all_groups_take_the_same_memory(dtype: torch.dtype) -> None:
    model, groups = shape("wwFwwF"), groups_of("wwFwwF")
    kv = PagedKV(model, 7, 4, dtype, groups=groups)
    assert kv.nbytes == 7 * bytes_per_block(model, 4, dtype, groups)
    assert 3 * bytes_per_block(model, 4, dtype, groups) == bytes_per_block(model, 4, dtype)
    assert [pages.group for pages in kv.layers] == list(groups.group)
    for number, pages in enumerate(kv.layers, 1):
        pages.keys[pages.group].fill_(number)  # a block of each group
    for number, pages in enumerate(kv.layers, 1):
        assert (pages.keys[pages.group] == number).all()
        assert not pages.keys[3:].any()


WIDE, NARROW = LayerShape(HeadShape(4, 1, 32)), LayerShape(HeadShape(4, 2, 8), 16)
FULL = NARROW._replace(window=None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize(
    ("layers", "full", "limited"),
    [((NARROW, NARROW, NARROW, WIDE), WIDE, 4), ((WIDE._replace(window=16), FULL), FULL, 1)],
)
def test_layers_of_two_shapes_share_blocks_of_one_size(
    dtype: torch.dtype, layers: tuple[LayerShape, ...], full: LayerShape, limited: int
) -> None:
    model = of(*layers, *layers)
    groups = layer_groups(model, 32)
    assert isinstance(groups, LayerGroups)
    assert (groups.full, groups.limited) == (2, limited)
    kv = PagedKV(model, 7, 4, dtype, groups=groups)
    assert kv.nbytes == 7 * bytes_per_block(model, 4, dtype, groups)
    for number, pages in enumerate(kv.layers, 1):
        for kept in (pages.keys, pages.values, pages.key_scales, pages.value_scales):
            if kept is not None:
                kept[pages.group].fill_(number)  # a block of each group
                number += 20
    for number, (pages, layer) in enumerate(zip(kv.layers, model.layers, strict=True), 1):
        assert pages.keys.shape == (7, 4, layer.heads.kv_heads, layer.heads.head_dim)
        for kept in (pages.keys, pages.values, pages.key_scales, pages.value_scales):
            if kept is not None:
                assert (kept[pages.group] == number).all()
                assert not kept[5:].any()
                number += 20
    content = torch.empty(kv.block_elements, dtype=kv.stored)
    kv.copy_blocks([0], [6])
    kv.read_blocks([6], [content])
    assert content.any()
    first = groups.first_full
    assert model.layers[first] == full
    assert (kv.layers[first].keys[6] == first + 1).all()


def test_the_gain_at_a_context() -> None:
    model, groups = shape("wwFwwF"), groups_of("wwFwwF")  # three groups of two layers
    assert gain(groups, model, 4800, 16) == pytest.approx(900 / (300 + 2 * 4))
    assert gain(groups, model, 48, 16) == 1.0


@pytest.mark.parametrize(
    ("full", "limited", "window", "groups", "times"),
    [
        ((3, HeadShape(8, 1, 512)), (12, HeadShape(8, 1, 256)), 512, 2, 2.90),  # Gemma 4 E2B
        ((10, HeadShape(32, 4, 512)), (50, HeadShape(32, 16, 256)), 1024, 10, 8.32),  # Gemma 4 31B
    ],
)
def test_the_gain_of_layers_of_two_shapes_at_32k_tokens(
    full: tuple[int, HeadShape], limited: tuple[int, HeadShape], window: int, groups: int, times: float
) -> None:
    model = of(*[LayerShape(limited[1], window)] * limited[0], *[LayerShape(full[1])] * full[0])
    found = layer_groups(model, 1)  # while it decodes
    assert isinstance(found, LayerGroups)
    assert found.windows.groups == groups
    assert gain(found, model, 32_768, 16) == pytest.approx(times, abs=0.01)
