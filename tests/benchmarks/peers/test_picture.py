from __future__ import annotations

import json

import pytest

from benchmarks.peers.picture import draw, read


def written(folder, *names: str, workload: str = "mixed", figure: str = "output tok/s", rate: float = 200.0):
    """A race's file in which every contender has half the speed of the one before."""
    standings = [
        {"name": name, "failed": 0, "values": {figure: rate / 2**i}, "ratios": {figure: 1 / 2**i}}
        for i, name in enumerate(names)
    ]
    settings = {"model": "m", "precision": "bf16", "workload": {"name": workload, "concurrency": 16}}
    path = folder / "race.json"
    path.write_text(json.dumps({"settings": settings, "standings": standings}))
    return path


def test_a_race_is_read_by_what_its_workload_is_judged_by(tmp_path):
    race = read(written(tmp_path, "headrace", "openvino"))
    assert race.title == "m, bf16, mixed 16"
    assert race.unit == "output tok/s"
    assert race.bars == (("headrace", 200.0, 1.0), ("openvino", 100.0, 0.5))


def test_a_prompt_alone_has_no_concurrency(tmp_path):
    path = written(tmp_path, "headrace", workload="prefill", figure="prefill tok/s")
    assert read(path).title == "m, bf16, prefill"


def test_what_is_no_race_is_refused(tmp_path):
    path = tmp_path / "other.json"
    path.write_text('{"settings": {}}')
    with pytest.raises(ValueError, match="no race's result"):
        read(path)


def test_all_results_are_relative_to_headrace(tmp_path):
    with pytest.raises(ValueError, match="not the first"):
        read(written(tmp_path, "openvino", "headrace"))


def test_a_picture_shows_titles_and_speeds_as_text_and_is_the_same_twice(tmp_path):
    race = read(written(tmp_path, "headrace", "openvino", "llama.cpp"))
    pictures = [tmp_path / "a.svg", tmp_path / "b.svg"]
    for picture in pictures:
        draw([race, race], picture)
    shown = pictures[0].read_text()
    assert shown == pictures[1].read_text()
    for text in ("m, bf16, mixed 16", "200 output tok/s", "50 output tok/s", "llama.cpp"):
        assert text in shown


def test_a_contender_without_a_figure_has_no_bar(tmp_path):
    """Not a number is null in JSON: a contender of which every request failed has no speed, a ratio no base."""
    path = written(tmp_path, "headrace", "openvino", "llama.cpp")
    reported = json.loads(path.read_text())
    reported["standings"][1] |= {
        "failed": 8,
        "values": {"output tok/s": None},
        "ratios": {"output tok/s": None},
    }
    path.write_text(json.dumps(reported))
    race = read(path)
    assert [bar.name for bar in race.bars] == ["headrace", "llama.cpp"]
    draw([race], tmp_path / "race.svg")
    reported["standings"][0]["values"] = {"output tok/s": None}
    path.write_text(json.dumps(reported))
    with pytest.raises(ValueError, match="Headrace is not the first"):
        read(path)
