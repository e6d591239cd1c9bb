"""Where a model is cut, and which positions its tables are given."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headrace.compute.adopted.decoder import cut, first_position, takes_positions
from headrace.compute.checkpoint import ModelError

VOCAB, POSITIONS, HIDDEN = 30, 20, 8
TOKENS = torch.tensor([3, 4, 5])


class Counting(nn.Embedding):
    """A table of positions that counts them from 0 if it is given none, as BART's."""

    def forward(self, tokens: Tensor, position_ids: Tensor | None = None) -> Tensor:  # type: ignore[override]
        if position_ids is None:
            position_ids = torch.arange(tokens.shape[1])
        return super().forward(position_ids)


class CountingBody(nn.Module):
    """A body without an argument for positions."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCAB, HIDDEN)
        self.places = Counting(POSITIONS, HIDDEN)

    def forward(self, input_ids: Tensor, attention_mask: Any = None, use_cache: bool = False) -> Any:
        return SimpleNamespace(last_hidden_state=self.words(input_ids) + self.places(input_ids))


class GivenBody(CountingBody):
    """A body that is given positions, for a plain table which begins behind its padding, as RoBERTa's."""

    def __init__(self, padding: int | None = 1, kind: type[nn.Embedding] = nn.Embedding) -> None:
        super().__init__()
        self.places = kind(POSITIONS, HIDDEN, padding_idx=padding)

    def forward(  # type: ignore[override]
        self, input_ids: Tensor, attention_mask: Any = None, position_ids: Any = None, use_cache: bool = False
    ) -> Any:
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1])[None] + (self.places.padding_idx or -1) + 1
        return SimpleNamespace(last_hidden_state=self.words(input_ids) + self.places(position_ids))


class Blind(nn.Module):
    """A body whose positions cannot be given."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCAB, HIDDEN)

    def forward(self, input_ids: Tensor, attention_mask: Any = None, use_cache: bool = False) -> Any:
        return SimpleNamespace(last_hidden_state=self.words(input_ids))


class Model(nn.Module):
    """A body and a head."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)

    def get_input_embeddings(self) -> nn.Module:
        words: nn.Module = self.body.words
        return words

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> Any:
        return SimpleNamespace(logits=self.head(self.body(input_ids).last_hidden_state))


def made(body: nn.Module) -> Model:
    torch.manual_seed(0)
    return Model(body).eval()


@pytest.mark.parametrize("body", [CountingBody(), GivenBody(), GivenBody(padding=None)])
@torch.inference_mode()
def test_a_row_in_pieces_is_placed_as_a_whole_row(body: nn.Module) -> None:
    model = made(body)
    row = torch.arange(3, 15)
    whole = model(row[None]).logits[0]
    first = first_position(model, POSITIONS)
    model_cut = cut(model, lambda: model(row[None]), first)
    at = torch.tensor([*range(5, 12), *range(5)])
    states = model_cut.states(row[at], at)
    assert torch.allclose(model_cut.logits(states), whole[at], atol=1e-6)


def test_a_plain_table_begins_behind_its_padding() -> None:
    assert first_position(made(GivenBody(padding=1)), POSITIONS) == 2
    assert first_position(made(GivenBody(padding=0)), POSITIONS) == 1
    assert first_position(made(GivenBody(padding=None)), POSITIONS) == 0
    assert first_position(made(GivenBody(padding=1)), POSITIONS - 2) == 0  # a table of something else
    assert first_position(made(CountingBody()), POSITIONS) == 0  # it counts itself


def test_the_table_of_words_is_no_table_of_positions() -> None:
    model = made(GivenBody(padding=None))
    model.body.words.padding_idx = 0
    assert first_position(model, VOCAB) == 0


def test_a_body_without_positions_is_refused() -> None:
    assert takes_positions(CountingBody())
    assert takes_positions(GivenBody())
    assert not takes_positions(Blind())
    model = made(Blind())
    with pytest.raises(ModelError, match="tokens and their positions"):
        cut(model, lambda: model(TOKENS[None]))
