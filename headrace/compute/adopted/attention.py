"""Attention, masks and mixers of transformers' models: their calls, and who computes them in a forward pass.

transformers calls `attend` for every layer of a model whose ``attn_implementation`` is `NAME`, and `Mask` where a model
creates a mask. A mask here is its predicate: `window_of` reads from it which keys a token attends to. What kernels do
not compute is refused when the calls of a model are recorded, before it serves.
"""

from __future__ import annotations

import inspect
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.compute.checkpoint import ModelError
from headrace.compute.kernels import HeadShape
from headrace.compute.model.shape import LayerShape

NAME = "headrace"

_EVERYTHING = (slice(None), slice(0, None))

Predicate = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Whether a token at a position may attend to a key: of batch, head, query and key indices, which broadcast."""


class Mask:
    """A mask of a model as its predicate; takes the place of a tensor."""

    ndim = 4

    def __init__(self, predicate: Predicate) -> None:
        self.predicate = predicate
        self.shape = (1, 1, 1, 1)

    def _computed_with(self, *_: object) -> NoReturn:
        raise ModelError("it changes its masks by code of its own, which the kernels cannot follow")

    __add__ = __radd__ = __mul__ = __rmul__ = _computed_with
    __and__ = __rand__ = __or__ = __ror__ = _computed_with
    dtype = property(_computed_with)

    def __getitem__(self, index: object) -> Mask:
        """The whole mask, if that is what is selected."""
        parts = index if isinstance(index, tuple) else (index,)
        if all(isinstance(part, slice) and part in _EVERYTHING for part in parts):
            return self
        raise ModelError("it selects elements of its masks, as sparse attention does")


class Attended(NamedTuple):
    """One call of attention: queries [T, H, D], keys [T, G, D], values [T, G, E], and its numbers.

    ``window`` is what the layer says of its window; its ``mask`` decides.
    """

    module: torch.nn.Module
    queries: Tensor
    keys: Tensor
    values: Tensor
    mask: object
    window: int | None
    scale: float
    softcap: float | None
    sinks: Tensor | None


class Mixing(NamedTuple):
    """One call of a mixer: its own forward pass and the arguments; ``hidden`` [1, T, hidden] is one of them."""

    module: Any
    plain: Callable[..., Any]
    arguments: inspect.BoundArguments

    def run(self, hidden: Tensor, cache: Any) -> Tensor:
        """The output [R, L, hidden] for rows [R, L, hidden] whose states are in a cache."""
        given = self.arguments.arguments
        given |= {"hidden_states": hidden, "cache": cache}
        if "attention_mask" in given:
            given["attention_mask"] = None
        found = self.plain(*self.arguments.args, **self.arguments.kwargs)
        out: Tensor = found[0] if isinstance(found, tuple) else found
        return out


class Listener(Protocol):
    """Receives the calls of one forward pass."""

    def attend(self, call: Attended) -> Tensor:
        """The attended values [T, H, E]."""
        ...

    def mix(self, call: Mixing) -> Tensor:
        """The output [1, T, hidden] of a mixer with a recurrent state."""
        ...


class _Running(threading.local):
    listener: Listener | None = None


_running = _Running()


def listener() -> Listener | None:
    """The listener of the forward pass of this thread."""
    return _running.listener


@contextmanager
def heard_by(heard: Listener) -> Iterator[None]:
    """Let ``heard`` compute the attention of forward passes of this thread."""
    before, _running.listener = _running.listener, heard
    try:
        yield
    finally:
        _running.listener = before


def register() -> None:
    """Make attention and masks of this project known to transformers."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, make_mask)


def make_mask(*, mask_function: Predicate, **_: Any) -> Mask:
    """What transformers calls where a model creates a mask."""
    return Mask(mask_function)


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """What transformers calls for each layer: query [1, H, T, D], key and value [1, G, T, D] -> [1, T, H, D]."""
    heard = _running.listener
    if heard is None:
        raise RuntimeError("attention outside of a step")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if not causal:
        raise ModelError("its attention looks ahead (is_causal is False)")
    if len(query) != 1 or query.shape[2] != key.shape[2]:
        raise ModelError(f"its attention has {query.shape[2]} queries for {key.shape[2]} new keys")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    q, k, v = (part[0].transpose(0, 1) for part in (query, key, value))
    out = heard.attend(Attended(module, q, k, v, attention_mask, sliding_window, scale, softcap, s_aux))
    return out.contiguous()[None], None


class Layer(NamedTuple):
    """One call of attention as recorded: the pages that it needs, and the features of its values."""

    module: torch.nn.Module
    shape: LayerShape
    value_dim: int
    sinks: bool


class Recording:
    """Records the calls of a forward pass over one row that begins at position 0; ``longest`` is the maximum context.

    It computes causal attention without a window, whatever the layer has. A layer that is given the keys and values
    of an earlier one, in the same memory, shares them.
    """

    def __init__(self, longest: int) -> None:
        self.layers: list[Layer] = []
        self._own: list[
            tuple[int, Attended]
        ] = []  # calls with keys and values of their own, which keep their memory
        self._longest = longest
        self._windows: dict[int, tuple[object, int | None]] = {}

    def attend(self, call: Attended) -> Tensor:
        """Record the layer."""
        heads, kv_heads = call.queries.shape[1], call.keys.shape[1]
        key_dim, value_dim = call.keys.shape[-1], call.values.shape[-1]
        if call.queries.shape[-1] != key_dim or heads % kv_heads or call.values.shape[1] != kv_heads:
            raise ModelError(
                f"attention of {heads} heads of {call.queries.shape[-1]} over {kv_heads} of {key_dim}"
            )
        if call.mask is None and call.window is not None:
            raise ModelError("a layer has a window, and no mask that shows it")
        if call.scale <= 0:
            raise ModelError(f"attention is scaled by {call.scale}")
        widest = max(key_dim, value_dim)
        shares = next((index for index, earlier in self._own if same_memory(earlier, call)), None)
        if shares is None:
            self._own.append((len(self.layers), call))
        size = HeadShape(heads, kv_heads, widest + widest % 2)
        shape = LayerShape(size, self._window(call.mask), shares)
        self.layers.append(Layer(call.module, shape, value_dim, call.sinks is not None))
        q, k, v = (part.transpose(0, 1) for part in (call.queries, call.keys, call.values))
        k, v = (part.repeat_interleave(heads // kv_heads, 0) for part in (k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=call.scale).transpose(0, 1)

    def mix(self, call: Mixing) -> Tensor:
        """The mixer as it is: the row begins at position 0."""
        return call.run(call.arguments.arguments["hidden_states"], None)

    def _window(self, mask: object) -> int | None:
        if id(mask) not in self._windows:
            self._windows[id(mask)] = mask, window_of(mask, self._longest)
        return self._windows[id(mask)][1]


def same_memory(one: Attended, other: Attended) -> bool:
    """Whether two calls have the same keys and values: views of the same elements."""
    return all(
        a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()
        for a, b in ((one.keys, other.keys), (one.values, other.values))
    )


def window_of(mask: object, longest: int) -> int | None:
    """The number of keys that tokens attend to under a mask, themselves included; None: all before them.

    It reads the predicate for all keys of many positions below ``longest``. No mask at all is causal.

    Raises:
        ModelError: the mask is neither causal nor a window.
    """
    if mask is None:
        return None
    if not isinstance(mask, Mask):
        raise ModelError(f"it makes a mask of its own ({type(mask).__name__})")
    last = longest - 1
    seen = _keys(mask, last, longest)
    window = len(seen) if len(seen) < longest else None
    step = max(1, longest // 32)
    near = () if window is None else (window - 1, window, window + 1, 2 * window)
    for position in sorted({*range(0, longest, step), *range(min(longest, 4)), *near, last}):
        if position > last:
            continue
        first = 0 if window is None else max(0, position + 1 - window)
        if _keys(mask, position, longest) != range(first, position + 1):
            raise ModelError(_unlike_a_window(mask, longest))
    return window


def _unlike_a_window(mask: Mask, longest: int) -> str:
    """Why a mask, which does not allow all keys before each position, is refused."""
    size = bisect_left(range(longest), True, key=lambda last: _keys(mask, last, longest).start > 0)
    positions = {*range(0, longest, max(1, longest // 32)), longest - 1, size - 1, size}
    if 0 < size < longest and all(
        _keys(mask, position, longest) == range(position // size * size, position + 1)
        for position in positions
    ):
        return f"it attends in chunks of {size} tokens; it is served with --max-model-len {size} or less, one chunk"
    return "a mask of it is neither causal nor a sliding window"


def _keys(mask: Mask, position: int, longest: int) -> range:
    """The keys that a token at a position attends to, which must be adjacent."""
    zero = torch.zeros((1,), dtype=torch.int64)
    keys = torch.arange(min(longest, position + 4097))
    try:
        allowed = mask.predicate(zero, zero, zero + position, keys)
        found = allowed.expand(len(keys)).nonzero().flatten()
    except (RuntimeError, IndexError, TypeError, AttributeError) as error:
        raise ModelError(f"a mask of it cannot be read: {str(error).partition(chr(10))[0][:120]}") from error
    if not len(found):
        return range(0)
    first, end = int(found[0]), int(found[-1]) + 1
    if end - first != len(found):
        raise ModelError("a mask of it has gaps")
    return range(first, end)
