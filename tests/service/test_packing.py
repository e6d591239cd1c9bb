from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.constraint import Constraint, ConstraintKind, ReasoningLimit
from headrace.core.events import Emitted, Event
from headrace.core.plan import TokenLogprob
from headrace.core.request import Request, RequestSettings, Retention, SamplingParams, Slo
from headrace.service.packing import Frames, codec_of, frame, pack_events, packed, unpack_events, unpacked


class Fruit(StrEnum):
    FIG = "fig"


class Basket(NamedTuple):
    fruits: tuple[Fruit, ...]
    label: str
    weights: Mapping[str, float]


@dataclass(frozen=True)
class Cart:
    basket: Basket | None
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Named:
    name: str
    basket: Basket | None


def through(message):
    """What arrives of a message."""
    (received,) = Frames().feed(frame(message))
    return received


@pytest.mark.parametrize("kind", get_args(Event), ids=lambda kind: kind.__name__)
@settings(max_examples=10, derandomize=True)
@given(data=st.data())
def test_every_event_arrives_as_it_was(kind, data):
    event = data.draw(st.from_type(kind))
    (arrived,) = unpack_events(through(pack_events([event])))
    assert type(arrived) is kind
    assert repr(arrived) == repr(event)  # also the types of the fields, and numbers that are none


def test_tokens_and_their_logprobs_arrive():
    scored = Emitted("a", (5,), (TokenLogprob(5, -0.5, 1, ((5, -0.5), (6, -1.5))),))
    events = [Emitted("a", (1, 2)), Emitted("b", (3,)), scored]
    assert unpack_events(through(pack_events(events))) == events


def test_a_request_arrives_with_every_field():
    params = SamplingParams(
        temperature=0.5,
        top_p=0.9,
        top_k=3,
        seed=2**62,
        logit_bias=((3, 1.5),),
        allowed_token_ids=(1, 2),
        bad_words=((1,), (2, 3)),
        max_tokens=9,
        stop=("é", "b"),
        stop_token_ids=(4,),
        logprobs=2,
        structured_outputs=Constraint(
            ConstraintKind.JSON, "{}", " ", "x", ReasoningLimit(5, ("<a>",), ("</a>",), opened=True)
        ),
    )
    request = Request(
        "r",
        (1, 2, 3),
        params,
        arrived=1.5,
        tenant="acme",
        service_class="flex",
        priority=-1,
        deadline=9.0,
        slo=Slo(0.5, None),
        retention=(Retention(0, None, 80, 5.0),),
        peer="p",
        follows=True,
        affinity="g",
        answered=(7,),
        prediction=(8,),
        cached_answer=(9,),
        indexed=False,
        salt="s",
        adapter="l",
        seed=2**63 - 1,
        eos_token_ids=frozenset({2}),
        call_format="f",
        settings=RequestSettings("ngram", 3, 0.5, 20.0),
    )
    assert unpacked(Request, through(packed(Request, request))) == request


@pytest.mark.parametrize("cart", [Cart(None), Cart(Basket((Fruit.FIG,), "l", {"a": 0.5}), (1, 2))])
def test_values_of_other_classes_arrive(cart):
    arrived = unpacked(Cart, through(packed(Cart, cart)))
    assert arrived == cart
    assert arrived.basket is None or type(arrived.basket.fruits[0]) is Fruit


def test_an_enumeration_in_place_of_a_text_arrives_as_text():
    assert type(through(packed(str, Fruit.FIG))) is str


@pytest.mark.parametrize("hint", [socket.socket, int | Fruit | dict[str, int] | Basket | list[Basket]])
def test_a_type_without_a_form_is_refused(hint):
    with pytest.raises(TypeError, match="no form"):
        codec_of(hint)


def test_messages_are_cut_wherever_the_bytes_were_split():
    messages = [("a", 1), ("b" * 300, (2.5, None)), ()]
    sent = b"".join(map(frame, messages))
    for size in (1, 3, 7, len(sent)):
        frames, received = Frames(), []
        for begin in range(0, len(sent), size):
            received += frames.feed(sent[begin : begin + size])
        assert received == messages


def test_a_step_takes_few_bytes_for_a_token():
    """A message of a step grows with its tokens and not with the length of their answers."""
    one, two = (len(frame(pack_events([Emitted("request-1", (5,))] * count))) for count in (1, 2))
    assert two - one < 40


def test_a_class_whose_fields_have_names_alone_arrives_as_it_was():
    value = Named(name="one", basket=None)
    assert unpacked(Named, through(packed(Named, value))) == value
