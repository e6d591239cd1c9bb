import json
from pathlib import Path

import pytest

from headrace.api.batch.lines import BadLine, BatchRequest, answered, refused
from headrace.api.batch.work import Results, ResultsError, result_line


def result(name: str, status_code: int = 200, text: str = "") -> dict[str, object]:
    return answered(BatchRequest(1, name, "/v1/completions", {}), status_code, "r", {"text": text})


def append(results: Results, value: dict[str, object]) -> None:
    results.append(value, result_line(value))


def test_results_are_lines_of_json(tmp_path: Path) -> None:
    with Results(tmp_path / "out.jsonl") as results:
        append(results, result("a", text="ü\n😀 \ud800"))
        append(results, refused(BadLine(2, None, "why")))
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text("utf-8").splitlines()]
    assert lines == [result("a", text="ü\n😀 \ud800"), refused(BadLine(2, None, "why"))]


def test_a_file_torn_at_any_byte_is_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with Results(path) as results:
        append(results, result("a"))
        append(results, result("b", text="ü"))
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        with Results(path) as results:
            expected = {"a", "b"} if cut == len(whole) else {"a"} if cut >= first else set()
            assert results.keys == expected
            for name in {"a", "b"} - expected:
                append(results, result(name))
        assert sorted(json.loads(line)["custom_id"] for line in path.read_bytes().splitlines()) == ["a", "b"]


def test_what_is_appended_is_in_the_file_before_it_is_closed(tmp_path: Path) -> None:
    results = Results(tmp_path / "out.jsonl")
    append(results, result("a"))
    assert (tmp_path / "out.jsonl").read_bytes().endswith(b"\n")
    results.close()


def test_failures_are_counted_from_the_file_too(tmp_path: Path) -> None:
    with Results(tmp_path / "out.jsonl") as results:
        append(results, result("a", status_code=400))
        append(results, result("b"))
    with Results(tmp_path / "out.jsonl") as results:
        assert results.failed == 1


def test_a_result_is_never_written_twice(tmp_path: Path) -> None:
    with Results(tmp_path / "out.jsonl") as results:
        append(results, result("a"))
        with pytest.raises(ResultsError, match="already has a result for 'a'"):
            append(results, result("a"))


def test_two_runs_cannot_write_to_one_file(tmp_path: Path) -> None:
    with (
        Results(tmp_path / "out.jsonl"),
        pytest.raises(ResultsError, match="another process"),
    ):
        Results(tmp_path / "out.jsonl")
    Results(tmp_path / "out.jsonl").close()


@pytest.mark.parametrize("content", ["precious notes\n", '{"id": 1}\n', "[]\n"])
def test_another_kind_of_file_is_refused_and_left_alone(tmp_path: Path, content: str) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text(content)
    with pytest.raises(ResultsError, match="line 1: not a result of a batch"):
        Results(path)
    assert path.read_text() == content
