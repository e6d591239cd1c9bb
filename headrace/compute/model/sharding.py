"""The part of a model that one rank computes, as data: its layers, heads, columns of the MLP and tokens.

```
 tensor parallel: every layer on every rank of a stage      pipeline parallel: some layers on each stage
   qkv, gate_up   outputs cut   (column parallel)             stage 0   embedding, layers 0 .. 13
   output, down   inputs cut    (row parallel), then          stage 1   layers 14 .. 27, norm, head
                  the ranks' products are added
   embedding, head   tokens cut
   experts    columns cut; or, expert parallel, whole on their ranks, whose results are added as those of columns
```
Rank ``r`` is rank ``r % tensor_size`` of stage ``r // tensor_size``. It knows neither processes nor files: `weights`
reads what a shard names, and `headrace.fleet` runs one process per rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from headrace.compute.checkpoint import LinearPlace, ModelError
from headrace.compute.model.layout import expert_places, linear_places
from headrace.compute.model.spec import DecoderSpec, ExpertsSpec

TENSOR, PIPELINE = "--tensor-parallel-size", "--pipeline-parallel-size"
EXPERT = "--enable-expert-parallel"


class Range(NamedTuple):
    """Elements ``begin`` to ``end``, excluded."""

    begin: int
    end: int

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.end - self.begin

    def times(self, width: int) -> Range:
        """The same range if each element is ``width`` wide."""
        return Range(self.begin * width, self.end * width)

    def after(self, offset: int) -> Range:
        """The same range behind ``offset`` other elements."""
        return Range(offset + self.begin, offset + self.end)


class Place(NamedTuple):
    """Where a rank stands among ``tensor_size * pipeline_size`` ranks.

    ``whole_experts``: each rank of a stage has some of the experts, and not some columns of each.
    """

    rank: int = 0
    tensor_size: int = 1
    pipeline_size: int = 1
    whole_experts: bool = False

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.tensor_size * self.pipeline_size

    @property
    def tensor_rank(self) -> int:
        """The rank within its stage."""
        return self.rank % self.tensor_size

    @property
    def stage(self) -> int:
        """The stage of the pipeline."""
        return self.rank // self.tensor_size

    @property
    def first(self) -> bool:
        """Whether the stage has the embedding."""
        return self.stage == 0

    @property
    def last(self) -> bool:
        """Whether the stage has the last norm and the head."""
        return self.stage == self.pipeline_size - 1

    def cut(self, count: int) -> Range:
        """This rank's part of ``count`` elements that the ranks of a stage divide as evenly as possible."""
        rank, size = self.tensor_rank, self.tensor_size
        return Range(rank * count // size, (rank + 1) * count // size)


ALONE = Place()
"""The only rank of a model in one process."""


class Cut(NamedTuple):
    """What a rank keeps of a linear layer: ranges of the outputs of each module, and a range of the inputs."""

    outputs: tuple[tuple[Range, ...], ...]
    inputs: Range


def whole_cut(place: LinearPlace) -> Cut:
    """All of a linear layer."""
    outputs: tuple[tuple[Range, ...], ...]
    if place.parts is None:
        modules = (*place.modules, *([place.again] if place.again else []))
        outputs = tuple((Range(0, place.modules[module]),) for module in modules)
    else:
        outputs = tuple(tuple(Range(*each) for each in parts) for parts in place.parts)
    return Cut(outputs, Range(0, place.inputs))


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of the model ``whole`` at a place. Ranges count elements of the whole model.

    ``spec`` describes the part as a model of its own: what the kernels compute and the KV cache stores.
    """

    whole: DecoderSpec
    place: Place
    layers: Range
    heads: Range
    kv_heads: Range
    inner: Range
    vocabulary: Range
    spec: DecoderSpec

    def cuts(self, index: int) -> Iterator[tuple[str, LinearPlace, Cut]]:
        """The linear layers of layer ``index``, each with this rank's part: see `layout.linear_places`."""
        if self.place == ALONE:
            for name, place in linear_places(self.whole, index).items():
                yield name, place, whole_cut(place)
            return
        ranges = self._outputs()
        size = self.whole.head_dim
        for name, place in linear_places(self.whole, index).items():
            inputs = {"output": self.heads.times(size), "down": self.inner}.get(name)
            modules = ranges.get(name) or ((Range(0, next(iter(place.modules.values()))),),)
            yield name, place, Cut(modules, inputs or Range(0, place.inputs))

    def expert_cuts(self, index: int) -> Iterator[tuple[tuple[LinearPlace, Cut], tuple[LinearPlace, Cut]]]:
        """The linear layers of each expert of layer ``index`` that this rank has, with its part of them: columns of all
        experts, or all of some experts and columns of the shared one.
        """
        own = None if self.spec.experts is None else self.spec.experts.own
        for number, (gate_up, down) in enumerate(expert_places(self.whole, index)):
            if own is not None and self.whole.experts and number < self.whole.experts.routing.experts:
                if own[0] <= number < sum(own):
                    yield (gate_up, whole_cut(gate_up)), (down, whole_cut(down))
                continue
            inner, hidden = self.place.cut(down.inputs), Range(0, gate_up.inputs)
            outputs = Cut(((inner,),) * len(gate_up.modules), hidden)
            yield (gate_up, outputs), (down, Cut(((hidden,),), inner))

    def _outputs(self) -> Mapping[str, tuple[tuple[Range, ...], ...]]:
        """The ranges of outputs of each module of the column parallel layers."""
        whole, size = self.whole, self.whole.head_dim
        queries, keys = self.heads.times(size), self.kv_heads.times(size)
        before_keys = whole.num_heads * size
        before_values = before_keys + whole.num_kv_heads * size
        inner = self.inner
        qkv: tuple[tuple[Range, ...], ...] = (queries,), (keys,), (keys,)
        gate_up: tuple[tuple[Range, ...], ...] = (inner,), (inner,)
        if whole.merged_qkv:
            qkv = ((queries, keys.after(before_keys), keys.after(before_values)),)
        if whole.merged_gate_up:
            gate_up = ((inner, inner.after(whole.intermediate_size)),)
        return {"qkv": qkv, "gate_up": gate_up}


def shard_of(spec: DecoderSpec, place: Place = ALONE) -> Shard:
    """The part of a model at a place.

    With fewer KV heads than ranks, several ranks have the same one.

    Raises:
        ModelError: the sizes do not divide the model: see `check_sizes`.
    """
    check_sizes(spec, place)
    heads = place.cut(spec.num_heads)
    kv_heads = place.cut(spec.num_kv_heads)
    if not kv_heads.size:
        kv_heads = Range(kv_heads.begin, kv_heads.begin + 1)
    layers = _layers(spec.num_layers, place)
    inner = place.cut(spec.intermediate_size)
    local = spec
    if place.size > 1:
        local = replace(
            spec,
            num_heads=heads.size,
            num_kv_heads=kv_heads.size,
            intermediate_size=inner.size,
            num_layers=layers.size,
            layers=spec.layers[layers.begin : layers.end],
            experts=_experts(spec.experts, place),
        )
    return Shard(spec, place, layers, heads, kv_heads, inner, place.cut(spec.vocab_size), local)


def _experts(experts: ExpertsSpec | None, place: Place) -> ExpertsSpec | None:
    """The experts of a rank, as wide as its part of each."""
    if experts is None:
        return None
    shared = place.cut(experts.shared_width).size
    if place.whole_experts:
        begin, end = place.cut(experts.routing.experts)
        return replace(experts, shared_width=shared, own=(begin, end - begin))
    width = place.cut(experts.width).size
    return replace(experts, width=width, shared_width=shared)


def check_sizes(spec: DecoderSpec, place: Place) -> None:
    """Raise ModelError, naming the option and what would work, if a model cannot be divided between so many ranks."""
    tensor_size, pipeline_size = place.tensor_size, place.pipeline_size
    if place.whole_experts:
        _check_experts(spec, tensor_size)
    for option, size in ((TENSOR, tensor_size), (PIPELINE, pipeline_size)):
        if size > 1 and spec.mixer is not None:
            raise ModelError(
                f"{option} {size}: {spec.architecture} keeps recurrent states, which one process computes; omit this "
                "option"
            )
        if size > 1 and not spec.alike:
            raise ModelError(
                f"{option} {size}: the layers of {spec.architecture} have different heads or inputs of their own, and "
                "are not divided; omit this option"
            )
    if tensor_size > 1 and spec.qk_norm == "projection":
        raise ModelError(
            f"{TENSOR} {tensor_size}: {spec.architecture} normalizes the queries of all heads together, so they "
            f"cannot be divided; use {PIPELINE}"
        )
    counts = (
        (spec.num_heads, "attention heads"),
        *((width, "columns of the MLP") for width in _widths(spec, place.whole_experts)),
        (max(spec.num_kv_heads, tensor_size), "KV heads"),
    )
    for count, what in counts:
        if count % tensor_size:
            raise ModelError(
                f"{TENSOR} {tensor_size}: it must divide the model's {count} {what}; {_working(spec, place)}"
            )
    if spec.num_kv_heads < tensor_size and tensor_size % spec.num_kv_heads:
        raise ModelError(
            f"{TENSOR} {tensor_size}: it must be a multiple of the model's {spec.num_kv_heads} KV heads;"
            f" {_working(spec, place)}"
        )
    if pipeline_size > spec.num_layers:
        raise ModelError(
            f"{PIPELINE} {pipeline_size}: the model has {spec.num_layers} layers, and each stage needs one"
        )


def _check_experts(spec: DecoderSpec, tensor_size: int) -> None:
    """Raise ModelError if the experts of a model cannot be given to so many ranks."""
    if tensor_size == 1:
        raise ModelError(f"{EXPERT}: one rank has all experts; set {TENSOR} to the number of ranks")
    if spec.experts is None:
        raise ModelError(f"{EXPERT}: {spec.architecture} has no experts; omit this option")
    if spec.experts.routing.experts % tensor_size:
        raise ModelError(
            f"{TENSOR} {tensor_size}: with {EXPERT} it must divide the model's {spec.experts.routing.experts} experts"
        )


def _widths(spec: DecoderSpec, whole_experts: bool) -> tuple[int, ...]:
    """The inner widths of MLPs and experts that ranks divide."""
    dense = (spec.intermediate_size,) if spec.sparse_layers < spec.num_layers else ()
    experts = spec.experts
    if experts is None:
        return dense
    return (*dense, experts.shared_width, *(() if whole_experts else (experts.width,)))


def _working(spec: DecoderSpec, place: Place) -> str:
    """The sizes of tensor parallelism that a model allows, for a message."""
    sizes = [
        size
        for size in range(1, spec.num_heads + 1)
        if not (spec.num_heads % size or any(width % size for width in _divided(spec, place)))
        and not (spec.num_kv_heads % size and size % spec.num_kv_heads)
    ]
    return f"sizes that work are {', '.join(map(str, sizes))}"


def _divided(spec: DecoderSpec, place: Place) -> tuple[int, ...]:
    """What a number of ranks must divide beside heads."""
    experts = (spec.experts.routing.experts,) if place.whole_experts and spec.experts else ()
    return (*_widths(spec, place.whole_experts), *experts)


def _layers(count: int, place: Place) -> Range:
    """The layers of a stage; the first stages have one more if they do not divide evenly.

    So no stage has a larger KV cache than the first, whose rank sizes it for all.
    """
    each, more = divmod(count, place.pipeline_size)
    begin = place.stage * each + min(place.stage, more)
    return Range(begin, begin + each + (place.stage < more))
