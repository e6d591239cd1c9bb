import pytest

from headrace.core.request import choice_seed
from headrace.response_cache.lookup import CacheLookup
from headrace.service.answer import StreamPace
from tests.api.caching import RequestsNoted
from tests.api.conftest import ANSWER, in_step
from tests.api.openai.test_chat import events
from tests.doubles.scripted_model import with_special_tokens

PATH = "/v1/completions"


def ask(house, **more):
    return house.client.post(PATH, json={"prompt": "hi fox", "max_tokens": 100} | more)


def test_a_whole_answer(house):
    answer = ask(house).json()
    assert answer["object"] == "text_completion"
    assert answer["choices"] == [
        {"index": 0, "text": ANSWER, "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    ]


def test_a_stream_joins_up_to_it(house):
    said = events(ask(house, stream=True))
    assert "".join(event["choices"][0]["text"] for event in said) == ANSWER
    assert said[-1]["choices"][0]["finish_reason"] == "stop"


def test_a_part_of_a_stream_waits_for_as_many_tokens_as_was_said(options, request):
    options |= {"stream_interval": 8, "step_seconds": 0.002}
    said = events(ask(request.getfixturevalue("house"), stream=True, return_token_ids=True))
    *parts, end = [event["choices"][0] for event in said[1:]]  # the first tells the prompt
    assert all(len(part["token_ids"]) >= 8 for part in parts[1:-1])
    assert "".join(part["text"] for part in parts) == ANSWER
    assert end["finish_reason"] == "stop"


def test_tokens_of_a_stream_share_events_while_the_server_is_loaded(house, monkeypatch):
    in_step(house, monkeypatch)
    pace = house.service.pace = StreamPace(1.0, clock=lambda: 0.0)  # which decides nothing by itself
    pace.tokens = 8
    texts = []
    for stop, least in (([], 8), (["never"], 1)):
        said = events(ask(house, stream=True, return_token_ids=True, stop=stop))
        first, *parts, end = [event["choices"][0] for event in said[1:]]
        assert len(first["token_ids"]) < 8
        assert min(len(part["token_ids"]) for part in parts[:-1]) == least
        assert end["finish_reason"] == "stop"
        texts.append("".join(part["text"] for part in (first, *parts)))
    assert texts == [ANSWER, ANSWER]


@pytest.mark.parametrize(
    ("more", "interval"),
    [
        ({}, (0, False)),
        ({"stream": True}, (8, True)),
        ({"stop": "never"}, (1, False)),
        ({"stream": True, "stop": "never"}, (1, False)),
    ],
)
def test_each_token_is_looked_at_where_text_may_end_the_answer(options, request, more, interval):
    seen = []

    class Noting(CacheLookup):
        async def open(self, questions, interval=1, paced=False):
            seen.append((interval, paced))
            return await super().open(questions, interval, paced)

    options |= {"stream_interval": 8, "lookup": Noting}
    assert ask(request.getfixturevalue("house"), **more).status_code == 200
    assert seen == [interval]


def test_every_prompt_gets_n_choices_in_order(house):
    answer = ask(house, prompt=["hi", "ho fox"], n=2, echo=True, max_tokens=1).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [choice["text"][:2] for choice in answer["choices"]] == ["hi", "hi", "ho", "ho"]


def test_sixteen_tokens_are_the_default(house):
    answer = house.client.post(PATH, json={"prompt": "hi"}).json()
    assert answer["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize("stream", [False, True])
def test_echo_puts_the_prompt_first(house, stream):
    answer = ask(house, echo=True, stream=stream)
    shown = (
        "".join(e["choices"][0]["text"] for e in events(answer))
        if stream
        else answer.json()["choices"][0]["text"]
    )
    assert shown == "hi fox" + ANSWER


def test_echo_of_tokens_and_of_a_truncated_prompt_is_their_text(house):
    tokens = house.model.tokenizer.encode("hi fox", add_special_tokens=False)
    assert ask(house, prompt=tokens, echo=True, max_tokens=1).json()["choices"][0]["text"] == "hi foxThe"
    cut = ask(house, truncate_prompt_tokens=1, echo=True, max_tokens=1).json()
    assert cut["choices"][0]["text"] == " foxThe"
    assert cut["usage"]["prompt_tokens"] == 1


def test_logprobs_of_prompt_and_answer(house):
    choice = ask(house, echo=True, logprobs=2, max_tokens=3).json()["choices"][0]
    scores = choice["logprobs"]
    assert "".join(scores["tokens"]) == choice["text"]
    assert scores["token_logprobs"][0] is None
    assert scores["top_logprobs"][0] is None
    assert len(scores["top_logprobs"][-1]) == 2
    for offset, token in zip(scores["text_offset"], scores["tokens"], strict=True):
        assert choice["text"][offset:].startswith(token)


def test_offsets_count_characters_of_the_prompt_however_its_tokens_cut_them(house):
    choice = ask(house, prompt="x 猫😀 fox", echo=True, logprobs=0, max_tokens=1).json()["choices"][0]
    assert choice["text"] == "x 猫😀 foxThe"
    scores = choice["logprobs"]
    found = list(zip(scores["tokens"], scores["text_offset"], strict=True))
    assert sum("\ufffd" in token for token, _ in found) > 2, "characters are cut"
    assert all(choice["text"][at:].startswith(token) for token, at in found if "\ufffd" not in token)


def test_a_prompt_alone_can_be_scored(house):
    answer = ask(house, echo=True, logprobs=0, max_tokens=0).json()
    assert answer["choices"][0]["text"] == "hi fox"
    assert len(answer["choices"][0]["logprobs"]["tokens"]) == answer["usage"]["prompt_tokens"]
    assert answer["usage"]["completion_tokens"] == 0
    assert ask(house, max_tokens=0).status_code == 400


def test_best_of_generates_more_than_it_tells(house):
    answer = ask(house, n=2, best_of=4).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert all(choice["logprobs"] is None for choice in answer["choices"])
    one = ask(house).json()
    assert answer["usage"]["completion_tokens"] == 4 * one["usage"]["completion_tokens"]


def test_token_ids_are_returned_on_request(house):
    choice = ask(house, return_token_ids=True).json()["choices"][0]
    assert house.model.tokenizer.decode(choice["prompt_token_ids"]) == "hi fox"
    assert house.model.tokenizer.decode(choice["token_ids"]) == ANSWER


def test_scores_of_the_prompt_in_both_shapes(house):
    choice = ask(house, echo=True, logprobs=1, prompt_logprobs=4, max_tokens=1).json()["choices"][0]
    assert max(map(len, choice["prompt_logprobs"][1:])) >= 4
    assert max(map(len, choice["logprobs"]["top_logprobs"][1:])) <= 2


def test_special_tokens_of_a_prompt_take_no_room_in_its_text(house):
    tokens = [house.model.tokenizer.bos_token_id, *house.model.tokenizer.encode("hi fox", False)]
    choice = ask(house, prompt=tokens, echo=True, logprobs=0, max_tokens=1).json()["choices"][0]
    assert choice["text"] == "hi foxThe"
    assert choice["logprobs"]["text_offset"] == [0, 0, 1, 2, 6]


def test_many_long_prompts_are_tokenized_as_one_by_one(house):
    prompts = ["the lazy fox " * 10 + str(i) for i in range(40)]
    answer = ask(house, prompt=prompts, max_tokens=1).json()
    expected = sum(len(house.model.tokenizer.encode(prompt)) for prompt in prompts)
    assert answer["usage"]["prompt_tokens"] == expected


@pytest.mark.parametrize("options", [{"max_model_len": 64}])
def test_a_long_prompt_may_be_cut_to_what_fits(house):
    prompt = [40] * 500
    assert ask(house, prompt=prompt).json()["error"]["code"] == "context_length_exceeded"
    answer = ask(house, prompt=prompt, max_tokens=1, truncate_prompt_tokens=-1)
    assert answer.json()["usage"]["prompt_tokens"] == 63


@pytest.mark.parametrize("options", [{"lookup": RequestsNoted}])
def test_answers_to_several_prompts_without_a_seed_are_drawn_apart(house):
    ask(house, prompt=["hi fox"] * 2, n=2, temperature=1, max_tokens=2)
    assert len({request.seed for request in house.lookup.requests}) == 4
    ask(house, prompt=["hi fox"] * 2, n=2, temperature=1, max_tokens=2, seed=5)
    assert [request.seed for request in house.lookup.requests[4:]] == [5, choice_seed(5, 1)] * 2


@pytest.mark.parametrize(
    ("field", "low", "high"),
    [
        ("temperature", 0, 2),
        ("top_p", 0.001, 1),
        ("min_p", 0, 1),
        ("presence_penalty", -2, 2),
        ("frequency_penalty", -2, 2),
    ],
)
def test_sampling_parameters_have_openais_ranges_and_errors_name_the_limit(house, field, low, high):
    for value in (low, high):
        assert ask(house, max_tokens=1, **{field: value}).status_code == 200
    for value in (low - 0.01, high + 0.01):
        answer = ask(house, max_tokens=1, **{field: value})
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["param"] == field
        assert f"{high:g}" in error["message"]
        assert f"{value:g}" in error["message"]


@pytest.mark.parametrize(
    ("body", "param"), [({"prompt": ["a"] * 100}, "prompt"), ({"prompt": "a", "n": 100}, "n")]
)
def test_a_call_that_could_never_wait_names_the_field_that_makes_it_large(house, body, param):
    answer = house.client.post("/v1/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


FIM = with_special_tokens(["<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<fim_pad>"])


@pytest.mark.parametrize("options", [{"tokenizer": FIM}])
@pytest.mark.parametrize("stream", [False, True])
def test_a_suffix_makes_a_prompt_with_the_models_markers(house, stream):
    answer = ask(house, suffix=" dog", return_token_ids=True, stream=stream)
    assert answer.status_code == 200, answer.text
    if not stream:
        (choice,) = answer.json()["choices"]
        prompt = FIM.decode(choice["prompt_token_ids"], skip_special_tokens=False)
        assert prompt == "<fim_prefix>hi fox<fim_suffix> dog<fim_middle>"
    plain = ask(house, suffix="", return_token_ids=True).json()["choices"][0]
    assert FIM.decode(plain["prompt_token_ids"]) == "hi fox"
    tokens = ask(house, prompt=[[5, 6], [7]], suffix=" dog", return_token_ids=True).json()["choices"]
    assert [choice["prompt_token_ids"][1] for choice in tokens] == [5, 7]


@pytest.mark.parametrize("options", [{"tokenizer": FIM}])
@pytest.mark.parametrize("more", [{"echo": True}, {"truncate_prompt_tokens": 3}, {"suffix": 5}])
def test_what_a_suffix_excludes(house, more):
    answer = ask(house, **({"suffix": "x"} | more))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "suffix"


def test_a_model_without_markers_refuses_a_suffix(house):
    error = ask(house, suffix="x").json()["error"]
    assert (error["param"], error["code"]) == ("suffix", "unsupported_parameter")


def test_minus_one_is_all_that_the_context_leaves(house):
    answer = ask(house, max_tokens=-1, ignore_eos=True).json()
    used = answer["usage"]
    assert used["prompt_tokens"] + used["completion_tokens"] == house.model.max_model_len
    assert answer["choices"][0]["finish_reason"] == "length"
    assert ask(house, max_tokens=-2).json()["error"]["param"] == "max_tokens"
    chat = {"messages": [{"role": "user", "content": "hi"}], "ignore_eos": True}
    for field in ("max_tokens", "max_completion_tokens"):
        used = house.client.post("/v1/chat/completions", json=chat | {field: -1}).json()["usage"]
        assert used["total_tokens"] == house.model.max_model_len


def test_the_side_that_truncation_drops_is_the_clients_choice(house):
    cut = {"truncate_prompt_tokens": 1, "echo": True, "max_tokens": 1}
    assert [
        ask(house, **cut, truncation_side=side).json()["choices"][0]["text"]
        for side in ("left", "right", None)
    ] == [" foxThe", "hThe", " foxThe"]
    assert ask(house, **cut, truncation_side="middle").json()["error"]["param"] == "truncation_side"


def test_log_probabilities_may_name_tokens_by_their_id(house):
    asked = {"logprobs": 2, "max_tokens": 3, "return_token_ids": True}
    by_text, by_id = (
        ask(house, **asked, return_tokens_as_token_ids=by_id).json()["choices"][0] for by_id in (False, True)
    )
    names = [f"token_id:{token}" for token in by_id["token_ids"]]
    assert by_id["logprobs"]["tokens"] == names
    assert all(name in top for name, top in zip(names, by_id["logprobs"]["top_logprobs"], strict=True))
    assert all(len(top) >= 2 for top in by_id["logprobs"]["top_logprobs"])
    assert by_id["logprobs"]["token_logprobs"] == by_text["logprobs"]["token_logprobs"]
    streamed = events(ask(house, **asked, return_tokens_as_token_ids=True, stream=True))
    sent = [name for each in streamed if (lp := each["choices"][0]["logprobs"]) for name in lp["tokens"]]
    assert sent == names
