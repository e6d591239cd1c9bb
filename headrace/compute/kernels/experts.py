"""Mixtures of experts: a layer's feed-forward as values, and its definition in plain torch.

A router gives each token a few of many MLPs and their weights; the layer's result is the weighted sum of what
they return (arXiv:1701.06538). A shared expert computes every token. It is one more expert here, chosen by all:

```
 x [T, hidden] ── route ──▶ indices, weights [T, chosen] ──▶ tokens sorted by expert ──▶ each expert, its tokens at once
                                                                                          └─▶ weighted sum of each token
```
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from headrace.compute.kernels.adapters import of_expert

if TYPE_CHECKING:
    from headrace.compute.kernels import Activation, Kernels

Scoring = Literal["softmax", "sigmoid"]
Shared = Literal["none", "plain", "gated"]


class Routing(NamedTuple):
    """How a router chooses ``chosen`` of ``experts`` and weighs them.

    ``scoring`` makes scores of its logits. Those of the chosen are divided by their sum if ``normalized``: with
    softmax, that is the softmax of the chosen logits alone. They are multiplied by ``scale``. With several ``groups``
    of neighbours, only experts of the ``kept_groups`` best ones are chosen, by the sum of the two highest scores of a
    group (arXiv:2412.19437). ``shared``: the expert behind these computes every token; "gated": its weight is the
    sigmoid of one more logit.
    """

    experts: int
    chosen: int
    scoring: Scoring = "softmax"
    normalized: bool = True
    scale: float = 1.0
    groups: int = 1
    kept_groups: int = 1
    shared: Shared = "none"

    @property
    def outputs(self) -> int:
        """The logits of a token."""
        return self.experts + (self.shared == "gated")

    @property
    def columns(self) -> int:
        """The experts that compute a token, with the shared one."""
        return self.chosen + (self.shared != "none")


class Router(NamedTuple):
    """``weight`` [outputs, hidden] of the logits, float32 or of the activations' dtype, as it was stored.

    ``correction`` float32 [experts] is added to scores when experts are chosen, and not to their weights
    (arXiv:2408.15664). ``bias`` float32 [outputs] is added to the logits.
    """

    weight: Tensor
    correction: Tensor | None
    routing: Routing
    bias: Tensor | None = None


class Mlp(NamedTuple):
    """An MLP; ``gate_up`` has the gate's outputs first, if there is a gate. Both are `stack.Linear`."""

    gate_up: Any
    down: Any


class OwnExperts(NamedTuple):
    """The experts ``first`` to ``first + size``, excluded, that a rank has of ``experts``; behind them a part of the
    shared one. ``loads`` int64 [experts] counts the tokens that the router gave to each, also to those of other ranks.
    """

    first: int
    size: int
    experts: int
    loads: Tensor

    def of(self, indices: Tensor) -> Tensor:
        """Where this rank has the experts ``indices``; those of other ranks are beyond its own."""
        self.loads.add_(indices.flatten().bincount(minlength=self.experts + 1)[: self.experts])
        places = indices - self.first
        places.masked_fill_((places < 0) | (places >= self.size), self.size + 1)
        return places.masked_fill_(indices == self.experts, self.size)


class Mixture(NamedTuple):
    """The experts of a layer; ``router`` and ``each`` as `Kernels.prepare_router` and `prepare_experts` made them.

    ``own``: only some of those that the router chooses are here, and ranks add their results.
    """

    router: Any
    each: Any
    own: OwnExperts | None = None

    @property
    def waits(self) -> bool:
        """Whether its tokens are counted on the host, which no graph can record: by the definition, or by rank."""
        return self.own is not None or isinstance(self.each, Sequence)


AddOfTokens = Callable[[str, Tensor, Tensor, Tensor], Tensor]
"""Adds the changes of a step's adapters to the outputs of an expert's linear layer: its name, inputs, outputs and the
tokens of their rows. See `adapters.StepChanges.add`."""

Feed = Mlp | Mixture
"""What computes the inner part of a layer."""

MAX_EXPERTS = 1024
"""The most experts of a layer (also in csrc/operations.h)."""
_LEAST_SUM = 1e-20


def route(x: Tensor, router: Router) -> tuple[Tensor, Tensor]:
    """The experts int64 [T, columns] of each token of ``x`` [T, hidden] in ascending order, and their weights float32.

    Logits, scores and weights are float32. Of equal scores the first counts.
    """
    weight, correction, routing, bias = router
    logits = torch.nn.functional.linear(x.float(), weight.float(), bias)
    gates = logits[:, routing.experts :].sigmoid()
    logits = logits[:, : routing.experts]
    scores = logits.softmax(-1) if routing.scoring == "softmax" else logits.sigmoid()
    ranked = scores if correction is None else scores + correction
    if routing.groups > 1:
        ranked = _within_groups(ranked, routing)
    indices = ranked.argsort(dim=-1, descending=True, stable=True)[:, : routing.chosen].sort(-1).values
    weights = scores.gather(1, indices)
    if routing.normalized:
        weights = weights / (weights.sum(-1, keepdim=True) + _LEAST_SUM)
    weights = weights * routing.scale
    if routing.shared == "none":
        return indices, weights
    own = gates if routing.shared == "gated" else torch.ones_like(weights[:, :1])
    last = torch.full_like(indices[:, :1], routing.experts)
    return torch.cat((indices, last), 1), torch.cat((weights, own), 1)


def _within_groups(ranked: Tensor, routing: Routing) -> Tensor:
    """Minus infinity in place of the scores of all groups but the best."""
    grouped = ranked.view(len(ranked), routing.groups, routing.experts // routing.groups)
    best = grouped.topk(min(2, grouped.shape[-1]), -1).values.sum(-1)
    kept = best.argsort(dim=-1, descending=True, stable=True)[:, : routing.kept_groups]
    absent = torch.ones_like(best, dtype=torch.bool).scatter_(1, kept, value=False)
    return grouped.masked_fill(absent[..., None], float("-inf")).flatten(1)


def apply(
    kernels: Kernels,
    x: Tensor,
    indices: Tensor,
    weights: Tensor,
    each: Sequence[Mlp],
    activation: Activation,
    add: AddOfTokens | None = None,
) -> Tensor:
    """The weighted sum [T, hidden] of what each token's experts return, added in float32 in the order of the experts.

    An index beyond the experts counts for nothing.
    """
    tokens, columns = indices.shape
    indices, ranks = indices.sort(-1)
    weights = weights.gather(1, ranks).float()
    ids = indices.flatten()
    order = ids.argsort(stable=True)
    owners = order // columns
    rows = x.index_select(0, owners)
    counts = ids.bincount(minlength=len(each)).tolist()
    results = torch.zeros_like(rows)
    begin = 0
    for expert, ((gate_up, down), count) in enumerate(zip(each, counts, strict=False)):
        if count:
            own = slice(begin, begin + count)
            part = kernels.linear(rows[own], gate_up.weight, gate_up.bias)
            part = part if add is None else add(of_expert("gate_up", expert), rows[own], part, owners[own])
            inner = activated(kernels, part, activation)
            part = kernels.linear(inner, down.weight, down.bias)
            results[own] = part if add is None else add(of_expert("down", expert), inner, part, owners[own])
            begin += count
    restored = torch.empty_like(results).index_copy_(0, order, results)
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for column, part in enumerate(restored.view(tokens, columns, x.shape[1]).unbind(1)):
        out += part.float() * weights[:, column, None]
    return out.to(x.dtype)


def activated(kernels: Kernels, wide: Tensor, activation: Activation) -> Tensor:
    """The inputs of an MLP's last linear layer from the outputs ``wide`` of its first, which it may overwrite.

    An MLP with the activation "squared_relu" has no gate: they are the squares of what is positive.
    """
    if activation == "squared_relu":
        return wide.relu_().square_()
    return kernels.gated_activation(wide, activation)


def mlp(kernels: Kernels, x: Tensor, of: Mlp, activation: Activation) -> Tensor:
    """What an MLP returns [T, hidden] for ``x`` [T, hidden]."""
    gate_up, down = of
    inner = activated(kernels, kernels.linear(x, gate_up.weight, gate_up.bias), activation)
    return kernels.linear(inner, down.weight, down.bias)


class DefinedExperts:
    """The MLPs and experts of kernels that compute them by their definition."""

    def mlp(self: Kernels, x: Tensor, of: Mlp, activation: Activation) -> Tensor:
        """See `Kernels.mlp`."""
        return mlp(self, x, of, activation)

    def prepare_router(self, router: Router) -> Router:
        """See `Kernels.prepare_router`."""
        return router

    def route(self, x: Tensor, router: Router) -> tuple[Tensor, Tensor]:
        """See `Kernels.route`."""
        return route(x, router)

    def prepare_experts(self, each: Sequence[Mlp], dtype: torch.dtype) -> Sequence[Mlp]:
        """See `Kernels.prepare_experts`."""
        return each

    def experts(
        self: Kernels,
        x: Tensor,
        indices: Tensor,
        weights: Tensor,
        each: Sequence[Mlp],
        activation: Activation,
        add: AddOfTokens | None = None,
    ) -> Tensor:
        """See `Kernels.experts`."""
        return apply(self, x, indices, weights, each, activation, add)
