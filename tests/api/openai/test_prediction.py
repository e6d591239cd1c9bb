"""The field ``prediction`` of chat completions, from the wire to ``usage``."""

import pytest

from headrace.core.drafting.acceptance import Acceptance
from headrace.core.drafting.draft_budget import DraftBudget
from headrace.core.drafting.drafter import BudgetedDrafter
from headrace.core.drafting.prediction import PredictionProposer
from headrace.core.drafting.suffix import NgramProposer
from tests.api.conftest import ANSWER, House

PATH = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture
def options(request):
    drafter = BudgetedDrafter([PredictionProposer(4), NgramProposer(4)], Acceptance(), DraftBudget(4))
    return {"drafter": drafter} | getattr(request, "param", {})


def ask(house: House, prediction: object, **more: object):
    return house.client.post(PATH, json={"messages": HI, "prediction": prediction} | more)


def counted(answer) -> tuple[int, int]:
    details = answer.json()["usage"]["completion_tokens_details"]
    return details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]


def content(text: object) -> dict:
    return {"type": "content", "content": text}


@pytest.mark.parametrize("as_parts", [False, True])
def test_a_right_prediction_is_accepted_and_changes_nothing(house, as_parts):
    plain = house.client.post(PATH, json={"messages": HI}).json()
    parts = [{"type": "text", "text": ANSWER[:9]}, {"type": "text", "text": ANSWER[9:]}]
    answer = ask(house, content(parts if as_parts else ANSWER))
    assert answer.json()["choices"] == plain["choices"]
    accepted, rejected = counted(answer)
    total = len(house.model.tokenizer.encode(ANSWER, add_special_tokens=False))
    assert (rejected, total - 1 - accepted <= total / 4) == (0, True)


def test_a_wrong_prediction_is_rejected_and_changes_nothing(house):
    answer = ask(house, content("Z" + "wrong 123 " * 9))
    assert answer.json()["choices"][0]["message"]["content"] == ANSWER
    accepted, rejected = counted(answer)
    assert accepted < rejected


def test_an_edit_in_the_middle_is_found_again(house):
    answer = ask(house, content(ANSWER.replace("jumps", "hops")))
    assert answer.json()["choices"][0]["message"]["content"] == ANSWER
    accepted, _ = counted(answer)
    total = len(house.model.tokenizer.encode(ANSWER, add_special_tokens=False))
    assert accepted >= total / 2


def test_drafts_of_other_sources_are_not_counted(house):
    answer = house.client.post(PATH, json={"messages": [{"role": "user", "content": ANSWER}]})
    assert counted(answer) == (0, 0)


@pytest.mark.parametrize("stream", [False, True])
def test_several_choices_add_up(house, stream):
    answer = ask(house, content(ANSWER), n=2, seed=1)
    one = ask(house, content(ANSWER), seed=1)
    assert counted(answer)[0] == 2 * counted(one)[0]


@pytest.mark.parametrize("options", [{"max_model_len": 64}], indirect=True)
@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"prediction": content("abc " * 100)}, "prediction.content", "maximum context length"),
        (
            {
                "prediction": content("x"),
                "tools": [{"type": "function", "function": {"name": "f"}}],
            },
            "prediction",
            "tools",
        ),
        ({"prediction": {"type": "content"}}, "prediction.content", ""),
        ({"prediction": {"type": "file", "content": "x"}}, "prediction.type", ""),
        ({"prediction": content(5)}, "prediction.content", ""),
        ({"prediction": content([{"type": "image_url"}])}, "prediction.content[0].type", ""),
        ({"prediction": "x"}, "prediction", ""),
    ],
)
def test_what_is_not_a_prediction_is_refused_by_name(house, fields, param, message):
    answer = house.client.post(PATH, json={"messages": [{"role": "user", "content": "h"}]} | fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert message in answer.json()["error"]["message"]


def test_nothing_asks_for_nothing(house):
    for empty in (None, content("")):
        answer = ask(house, empty)
        assert answer.status_code == 200
        assert counted(answer) == (0, 0)


def test_metrics_usage_and_explanations_add_up(house):
    predictions = (ANSWER, "Z" + "wrong 123 " * 9, ANSWER.replace("jumps", "hops"), ANSWER[:7])
    answers = [ask(house, content(text)) for text in predictions]
    lines = house.client.get("/metrics").text.splitlines()

    def total(name: str) -> int:
        return int(sum(float(line.rsplit(" ", 1)[1]) for line in lines if f"spec_decode_{name}{{" in line))

    explained = [house.client.get(f"/v1/requests/{answer.json()['id']}").json() for answer in answers]
    shown = [each for one in explained for each in (one["drafting"] or {"sources": {}})["sources"].values()]
    drafted, accepted = total("num_draft_tokens_total"), total("num_accepted_tokens_total")
    by_position = total("num_accepted_tokens_per_pos_total")
    assert 0 < accepted < drafted
    assert by_position == accepted
    assert sum(each["drafted_tokens"] for each in shown) == drafted
    assert sum(each["accepted_tokens"] for each in shown) == accepted
    own = [line for line in lines if 'source="prediction"' in line]
    mine = {
        name: sum(float(line.rsplit(" ", 1)[1]) for line in own if f"spec_decode_{name}{{" in line)
        for name in ("num_draft_tokens_total", "num_accepted_tokens_total")
    }
    reported = [counted(answer) for answer in answers]
    assert sum(right for right, _ in reported) == mine["num_accepted_tokens_total"]
    assert sum(right + wrong for right, wrong in reported) == mine["num_draft_tokens_total"]
