from __future__ import annotations

import json

from prometheus_client.parser import text_string_to_metric_families

from headrace.api.models.routes import joined_lists, joined_metrics

ONE = """# HELP headrace:a_total Things.
# TYPE headrace:a_total counter
headrace:a_total{model_name="one",kind="x \\" , y"} 3.0
# HELP process_threads Threads.
# TYPE process_threads gauge
process_threads 7.0
# HELP python_info Python.
# TYPE python_info gauge
python_info{version="3"} 1.0
"""
TWO = ONE.replace('"one"', '"two"').replace(" 3.0", " 4.0")


def test_families_stand_once_with_the_series_of_all_models():
    page = joined_metrics([("one", ONE), ('t"wo', TWO)])
    assert page.count("# TYPE headrace:a_total") == 1
    found = {
        (sample.name, sample.labels["model_name"]): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }
    assert found == {
        ("headrace:a_total", "one"): 3.0,
        ("headrace:a_total", "two"): 4.0,
        ("process_threads", "one"): 7.0,
        ("process_threads", 't"wo'): 7.0,
        ("python_info", "one"): 1.0,
        ("python_info", 't"wo'): 1.0,
    }


def test_families_of_one_model_only():
    page = joined_metrics([("one", ""), ("two", ONE)])
    assert 'process_threads{model_name="two"} 7.0' in page


def listed(*names: str, **more) -> bytes:
    return json.dumps({"data": [{"id": name, "of": names[0]} for name in names], **more}).encode()


def test_lists_are_joined_and_the_first_card_of_a_name_counts():
    joined = joined_lists([listed("a", "shared", object="list"), listed("b", "shared", object="list")])
    assert joined["object"] == "list"
    assert [(card["id"], card["of"]) for card in joined["data"]] == [("a", "a"), ("shared", "a"), ("b", "b")]


def test_the_last_id_is_that_of_the_joined_list():
    joined = joined_lists([listed("a", first_id="a", last_id="a"), listed("b", first_id="b", last_id="b")])
    assert (joined["first_id"], joined["last_id"]) == ("a", "b")


def test_no_model_answers():
    assert joined_lists([]) == {"object": "list", "data": []}
