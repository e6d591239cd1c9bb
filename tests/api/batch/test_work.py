import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace.api.batch import work
from headrace.api.batch.lines import BadLine, BatchRequest, answered, read_lines, refused
from headrace.api.batch.work import Outcome, Results, ResultsError, ServerGone, result_line, run_batch


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


Answer = Callable[[httpx.Request], Awaitable[httpx.Response]]


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "FIRST_WAIT_SECONDS", 0.0)
    monkeypatch.setattr(work, "MAX_WAIT_SECONDS", 0.0)


def line(name: str, **body: Any) -> bytes:
    return json.dumps({"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body}).encode()


def run_lines(
    path: Path, lines: list[bytes], answer: Answer, concurrency: int = 4, model: str | None = None
) -> tuple[dict[str, Any], list[Outcome]]:
    outcomes: list[Outcome] = []

    async def main() -> None:
        transport = httpx.MockTransport(answer)
        with Results(path) as results:
            async with httpx.AsyncClient(transport=transport, base_url="http://fake") as client:
                await run_batch(
                    client,
                    read_lines(lines),
                    results,
                    concurrency=concurrency,
                    ended=outcomes.append,
                    model=model,
                )

    asyncio.run(main())
    written = [json.loads(raw) for raw in path.read_bytes().splitlines()]
    return {result["custom_id"] or result["id"]: result for result in written}, outcomes


async def echo(request: httpx.Request) -> httpx.Response:
    body = json.loads(request.content)
    usage = {"prompt_tokens": 2, "completion_tokens": 3}
    return httpx.Response(200, json={"id": "cmpl-1", "asked": body, "usage": usage})


def test_every_line_gets_its_result(tmp_path: Path) -> None:
    lines = [line(f"r{number}", prompt=str(number)) for number in range(20)]
    results, outcomes = run_lines(tmp_path / "out", [*lines, b"{"], echo)
    assert len(results) == 21
    for number in range(20):
        assert results[f"r{number}"]["response"]["body"]["asked"] == {"prompt": str(number)}
        assert results[f"r{number}"]["response"]["request_id"] == "cmpl-1"
    assert "not valid JSON" in results["batch_req_21"]["error"]["message"]
    assert sorted(outcomes) == [Outcome(False, 0, 0)] + [Outcome(True, 2, 3)] * 20


def test_lines_with_a_result_are_not_sent_again(tmp_path: Path) -> None:
    sent: list[str] = []

    async def remember(request: httpx.Request) -> httpx.Response:
        sent.append(json.loads(request.content)["prompt"])
        return await echo(request)

    lines = [line("a", prompt="a"), b"{", line("b", prompt="b")]
    run_lines(tmp_path / "out", lines[:2], remember)
    results, outcomes = run_lines(tmp_path / "out", lines, remember)
    assert sent == ["a", "b"]
    assert results.keys() == {"a", "b", "batch_req_2"}
    assert len(outcomes) == 1


def test_no_more_requests_are_under_way_than_allowed(tmp_path: Path) -> None:
    now = most = 0

    async def count(request: httpx.Request) -> httpx.Response:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.001)
        now -= 1
        return await echo(request)

    run_lines(tmp_path / "out", [line(f"r{number}") for number in range(20)], count, concurrency=3)
    assert most == 3


def test_a_refusal_is_a_result(tmp_path: Path) -> None:
    async def refuse(request: httpx.Request) -> httpx.Response:
        return httpx.Response(400, text="no", headers={"x-request-id": "req-9"})

    results, outcomes = run_lines(tmp_path / "out", [line("a")], refuse)
    assert results["a"]["response"] == {"status_code": 400, "request_id": "req-9", "body": "no"}
    assert results["a"]["error"] is None
    assert outcomes == [Outcome(False, 0, 0)]


@pytest.mark.parametrize("trouble", [503, 429, "lost"])
def test_a_busy_or_lost_server_is_asked_again(tmp_path: Path, trouble: int | str) -> None:
    tries = 0

    async def third_time(request: httpx.Request) -> httpx.Response:
        nonlocal tries
        tries += 1
        if tries == 3:
            return await echo(request)
        if isinstance(trouble, str):
            raise httpx.ReadError("gone")
        return httpx.Response(trouble, headers={"retry-after": "soon"})

    results, _ = run_lines(tmp_path / "out", [line("a")], third_time)
    assert results["a"]["response"]["status_code"] == 200


def test_a_server_that_stays_busy_is_a_result_at_last(tmp_path: Path) -> None:
    async def busy(request: httpx.Request) -> httpx.Response:
        return httpx.Response(503, json={})

    results, _ = run_lines(tmp_path / "out", [line("a")], busy)
    assert results["a"]["response"]["status_code"] == 503


def test_a_server_that_is_gone_ends_the_run_and_costs_no_line(tmp_path: Path) -> None:
    async def gone_after_two(request: httpx.Request) -> httpx.Response:
        if json.loads(request.content)["n"] < 2:
            return await echo(request)
        raise httpx.ConnectError("refused")

    lines = [line(f"r{number}", n=number) for number in range(9)]
    with pytest.raises(ServerGone, match="no answer from http://fake"):
        run_lines(tmp_path / "out", lines, gone_after_two, concurrency=2)
    results, _ = run_lines(tmp_path / "out", lines, echo)
    assert results.keys() == {f"r{number}" for number in range(9)}
    assert all(result["response"]["status_code"] == 200 for result in results.values())


def test_when_the_run_ends_no_request_is_left_under_way(tmp_path: Path) -> None:
    async def hang_or_go(request: httpx.Request) -> httpx.Response:
        if json.loads(request.content)["n"] == 0:
            await asyncio.Event().wait()
        raise httpx.ConnectError("refused")

    with pytest.raises(ServerGone):
        run_lines(tmp_path / "out", [line("a", n=0), line("b", n=1)], hang_or_go)


def test_the_model_of_all_lines_can_be_replaced(tmp_path: Path) -> None:
    results, _ = run_lines(tmp_path / "out", [line("a", model="gpt", prompt="x")], echo, model="mine")
    assert results["a"]["response"]["body"]["asked"] == {"model": "mine", "prompt": "x"}


@pytest.mark.parametrize(
    "bad",
    [
        line("bad", temperature=float("nan")),
        line("bad", prompt="\ud800"),
        line("bad").replace(b"/v1/completions", b"/v1/\\n"),
        line("bad").replace(b"/v1/completions", b"/v1/" + b"a" * 70_000),
    ],
    ids=["nan", "surrogate", "url", "long url"],
)
def test_a_line_that_cannot_be_sent_ends_alone(tmp_path: Path, bad: bytes) -> None:
    results, _ = run_lines(tmp_path / "out", [line("a"), bad, line("b")], echo)
    assert results.keys() == {"a", "bad", "b"}
    assert results["bad"]["error"]["code"] == "invalid_line"
    assert results["b"]["response"]["status_code"] == 200


@pytest.mark.parametrize("health", [200, 503, 404])
def test_a_server_error_is_a_result_unless_the_whole_engine_failed(tmp_path: Path, health: int) -> None:
    async def fail(request: httpx.Request) -> httpx.Response:
        return httpx.Response(health if request.url.path == "/health" else 500, json={})

    if health == 503:
        with pytest.raises(ServerGone, match="has failed"):
            run_lines(tmp_path / "out", [line("a")], fail)
        assert (tmp_path / "out").read_bytes() == b""
    else:
        results, _ = run_lines(tmp_path / "out", [line("a")], fail)
        assert results["a"]["response"]["status_code"] == 500
