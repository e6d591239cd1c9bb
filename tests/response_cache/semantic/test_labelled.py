from __future__ import annotations

from pathlib import Path

import pytest

from headrace.response_cache.semantic.calibrate import BadRows, Pair, Pairs, Question, Stream, read_rows


def test_pairs(tmp_path: Path) -> None:
    file = tmp_path / "pairs.csv"
    file.write_text('Text_A,text_b,same\n"Is it, well, open?",Is it open?,1\nA?,B?,0\n')
    rows = read_rows(file)
    assert rows == Pairs("pairs", (Pair("Is it, well, open?", "Is it open?", True), Pair("A?", "B?", False)))
    assert [half.rows for half in rows.halves()] == [rows.rows[:1], rows.rows[1:]]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("intents.csv", "text,category\nwhere is my card,card\nhi,greeting\n"),
        ("intents.csv", "id,query,intent\n1,where is my card,card\n2,hi,greeting\n"),
        ("intents.json", '[["where is my card", "card"], ["hi", "greeting"]]'),
        ("intents.json", '{"train": [["where is my card", "card"], ["hi", "greeting"]], "test": []}'),
    ],
)
def test_questions_with_intents(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    expected = (Question("where is my card", "card"), Question("hi", "greeting"))
    assert read_rows(tmp_path / name) == Stream("intents", expected)


def test_a_row_of_a_table_ends_at_a_newline_alone(tmp_path: Path) -> None:
    texts = ["where\u2028is my card", "is it\x85there", "or\x0cthere"]
    rows = "".join(f"{text},card\n" for text in texts)
    (tmp_path / "a.csv").write_text(f"query,intent\n{rows}", encoding="utf-8")
    assert read_rows(tmp_path / "a.csv").rows == tuple(Question(text, "card") for text in texts)


def test_an_order_is_the_seeds() -> None:
    stream = Stream("s", tuple(Question(str(i), "") for i in range(50)))
    assert stream.shuffled(1) == stream.shuffled(1) != stream.shuffled(2)
    assert sorted(stream.shuffled(1).rows) == sorted(stream.rows)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "x,y\n1,2\n", "needs the columns"),
        ("a.csv", "text_a,text_b,same\nA,B,maybe\n", "line 2: same must be 0 or 1"),
        ("a.json", "{", "is not JSON"),
        ("a.json", '[["only one"]]', "must be a list of"),
        ("a.json", '{"test": []}', "must be a list of"),
    ],
)
def test_files_that_are_something_else(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(BadRows, match=message):
        read_rows(tmp_path / name)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BadRows, match="cannot be read"):
        read_rows(tmp_path / "gone.csv")
