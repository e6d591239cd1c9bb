"""Thousands of requests drawn from the server's own OpenAPI document, to a real server.

Every answer must be below 500, every refusal must have the shape of its API and name the field, every stream must end
as streams end. Afterwards no request may be open and no KV block held. The same seed draws the same requests.
hypothesis draws them and reduces what fails; it is in ``.[test]``.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from hypothesis import HealthCheck, Phase, given, seed, settings

from benchmarks.stage import arguments, say, server
from tests.judges.api_bodies import Document, Place, Sent, operations, requests

TEMPLATE = (
    "{% if tools %}[tools] {{ tools | tojson }} "
    'Call as <tool_call>{"name": NAME, "arguments": OBJECT}</tool_call>{{ "\\n" }}{% endif %}'
    "{% for m in messages %}[{{ m.role }}] {% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>"
    "{% endif %}{{ m.content }}{% for call in m.tool_calls or () %}<tool_call>"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "</tool_call>{% endfor %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% if enable_thinking is defined %}"
    "{% if enable_thinking %}<think>{% else %}<think></think>{% endif %}{% endif %}{% endif %}"
)
"""A chat template that knows tools and reasoning, so that requests with them are computed."""

NAMED = frozenset(
    {
        "invalid_value",
        "invalid_type",
        "missing_required_parameter",
        "unknown_parameter",
        "unsupported_parameter",
        "unsupported_schema",
        "invalid_grammar",
        "template_error",
    }
)
"""Codes of errors that are about a field."""

NAMELESS = re.compile(
    "valid JSON|must be a JSON object|prompt is too long|There is no route|is not allowed on"
)
"""Anthropic's refusals that are about no field, or not about one."""

TIMEOUT_SECONDS = 120.0
IDLE_SECONDS = 60.0


def flags(folder: Path) -> list[str]:
    """Options of a server on which every route of the document works and no answer is long."""
    template = folder / "template.jinja"
    template.write_text(TEMPLATE, encoding="utf-8")
    options = {"--chat-template": template, "--batch-path": folder / "batches", "--max-model-len": 512}
    options |= {"--max-body-bytes": 200_000, "--kv-cache-memory-bytes": 64 << 20}
    return [str(part) for option in options.items() for part in option]


@dataclass
class Findings:
    """Statuses by route, and what is wrong."""

    statuses: dict[str, Counter[int]] = field(default_factory=dict)
    demanded: int = 0
    wrong: list[str] = field(default_factory=list)

    @property
    def cases(self) -> int:
        """Requests sent."""
        return sum(sum(counts.values()) for counts in self.statuses.values())


class Fuzz:
    """Sends drawn requests to a server and judges the answers."""

    def __init__(self, client: httpx.Client) -> None:
        self._client = client
        self.document: Document = client.get("/openapi.json").json()
        self.findings = Findings()
        self.place = Place(client.get("/v1/models").json()["data"][0]["id"], self._make_ids())

    def run(self, cases: int, drawn_by: int) -> None:
        """Send ``cases`` requests, a route with a body twelve times as many as one without.

        A route ends at its first wrong answer, which is then reduced to the smallest request that has one like it.
        """
        routes = operations(self.document)
        weights = [12 if "requestBody" in self._entry(*route) else 1 for route in routes]
        for (method, route), weight in zip(routes, weights, strict=True):
            count = max(1, round(cases * weight / sum(weights)))
            try:
                self.send(method, route, count, drawn_by)
            except AssertionError as error:
                self.findings.wrong.append(str(error))

    def send(self, method: str, route: str, count: int, drawn_by: int) -> None:
        """Send ``count`` requests to one route."""

        @seed(drawn_by)
        @settings(
            max_examples=count,
            database=None,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        )
        @given(requests(self.document, method, route, self.place))
        def one(sent: Sent) -> None:
            answer = self._exchange(sent)
            counts = self.findings.statuses.setdefault(f"{method} {route}", Counter())
            counts[answer.status_code] += 1
            problem = self.judge(sent, answer)
            assert not problem, f"{problem}\n{answer.status_code} {answer.text[:600]}\n{sent!r}"[:4000]

        one()

    def judge(self, sent: Sent, answer: httpx.Response) -> str:
        """What is wrong with an answer; empty if nothing is."""
        if answer.status_code >= 500:
            if '"not_cached"' in answer.text or "only_if_cached" in answer.text:
                self.findings.demanded += 1  # 504 is RFC 9111's answer to only-if-cached
                return ""
            return "an error of the server"
        if answer.status_code >= 400:
            known = names_of(self.document, self._entry(sent.method, sent.route))
            return wrong_refusal(sent, answer, known)
        if answer.headers.get("content-type", "").startswith("text/event-stream"):
            return wrong_stream(sent, answer.text)
        return ""

    def wait_until_idle(self) -> str:
        """What is left behind once the server is idle; empty if nothing is."""
        until = time.monotonic() + IDLE_SECONDS
        while True:
            info = self._client.get("/server_info").json()
            held = [_metric(self._client, name) for name in LEFT]
            left = {"open_requests": info["open_requests"], **dict(zip(LEFT, held, strict=True))}
            if not any(left.values()):
                return ""
            if time.monotonic() > until:
                return f"left behind: {left}"
            time.sleep(0.1)

    def _exchange(self, sent: Sent) -> httpx.Response:
        if sent.media == "multipart/form-data":
            answer = self._client.request(sent.method, sent.path, **_form(sent.body))
        elif sent.media:
            content = json.dumps(sent.body).encode()
            answer = self._client.request(
                sent.method, sent.path, content=content, headers={"Content-Type": sent.media}
            )
        else:
            answer = self._client.request(sent.method, sent.path)
        if sent.route == "/pause":
            self._client.post("/resume")
        return answer

    def _entry(self, method: str, route: str) -> Mapping[str, Any]:
        entry: Mapping[str, Any] = self.document["paths"][route][method.lower()]
        return entry

    def _make_ids(self) -> list[str]:
        """Ids that exist: of a response, of a file, and of a batch."""
        line = {"custom_id": "1", "method": "POST", "url": "/v1/completions"}
        line["body"] = {"prompt": "Once", "max_tokens": 2}  # type: ignore[assignment]
        file = {"file": ("lines.jsonl", json.dumps(line).encode())}
        uploaded = self._client.post("/v1/files", files=file, data={"purpose": "batch"}).json()["id"]
        response = self._client.post("/v1/responses", json={"input": "Hi", "max_output_tokens": 2}).json()[
            "id"
        ]
        asked = {"input_file_id": uploaded, "endpoint": "/v1/completions", "completion_window": "24h"}
        return [response, uploaded, self._client.post("/v1/batches", json=asked).json()["id"]]


LEFT = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")


def _metric(client: httpx.Client, name: str) -> float:
    lines = client.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"headrace:{name}{{"))


def _form(body: Any) -> dict[str, Any]:
    """A drawn form as httpx sends it; what is no form goes as JSON."""
    if not isinstance(body, dict):
        return {"content": json.dumps(body).encode()}
    files = [
        (name, ("f" if name == "file" else None, json.dumps(value) if not isinstance(value, str) else value))
        for name, value in body.items()
    ]
    try:
        [part.encode() for name, (_, part) in files for part in (name, part)]
    except UnicodeEncodeError:
        return {"content": json.dumps(body).encode()}
    return {"files": files} if files else {"content": b""}


def names_of(document: Document, entry: Mapping[str, Any]) -> set[str]:
    """The fields of a route's body, its path parameters, and its query parameters."""
    names = {parameter["name"] for parameter in entry.get("parameters", ())}
    names |= {"limit", "after", "order", "tenant", "purpose", "stream", "id", "x"}
    for content in entry.get("requestBody", {}).get("content", {}).values():
        schema = document["components"]["schemas"][content["schema"]["$ref"].rpartition("/")[2]]
        names |= set(schema["properties"])
    return names


def wrong_refusal(sent: Sent, answer: httpx.Response, known: set[str]) -> str:
    """What is wrong with a refusal; empty if nothing is."""
    try:
        told = answer.json()
    except ValueError:
        return "a refusal that is not JSON"
    given = known | (set(sent.body) if isinstance(sent.body, dict) else set())
    if sent.route.startswith("/v1/messages"):
        if told.get("type") != "error" or not {"type", "message"} <= set(told["error"]):
            return "a refusal that is not in Anthropic's shape"
        message = told["error"]["message"]
        about_none = answer.status_code != 400 or NAMELESS.search(message)
        named = any(re.search(rf"(?<!\w){re.escape(name)}(?!\w)", message) for name in given)
        return "" if about_none or named else "no field is named"
    error = told.get("error")
    if not isinstance(error, dict) or set(error) != {"message", "type", "param", "code"}:
        return "a refusal that is not in OpenAI's shape"
    if not error["message"] or not error["code"]:
        return "a refusal without a message or a code"
    if answer.status_code == 400 and error["code"] in NAMED:
        param = error["param"]
        if not param and param not in given:
            return "no field is named"
        if re.split(r"[.\[]", param)[0] not in given and param not in given:
            return f"the field {param!r} is not in the request"
    return ""


def wrong_stream(sent: Sent, text: str) -> str:
    """What is wrong with a stream of events; empty if nothing is."""
    if '"server_error"' in text or '"api_error"' in text:
        return "an error of the server in a stream"
    ends = "event: message_stop" if sent.route == "/v1/messages" else "data: [DONE]"
    return "" if ends in text or "event: error" in text else "a stream that does not end"


def show(findings: Findings) -> None:
    """Print the table of routes."""
    say("| route | cases | 2xx | 4xx | 5xx |")
    say("|---|---|---|---|---|")
    totals = Counter[int]()
    for route, counts in findings.statuses.items():
        by_class = Counter[int]()
        for status, count in counts.items():
            by_class[status // 100] += count
        totals += by_class
        say(f"| {_row(route, by_class)} |")
    say(f"| {_row('all', totals)} |")
    for problem in findings.wrong:
        say(f"WRONG: {problem}")
    say(f"504 as only_if_cached demands, among the 5xx: {findings.demanded}")


def _row(name: str, by_class: Mapping[int, int]) -> str:
    cells: Sequence[object] = (name, sum(by_class.values()), *(by_class.get(kind, 0) for kind in (2, 4, 5)))
    return " | ".join(map(str, cells))


def parsed() -> argparse.Namespace:
    """The arguments."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--cases", type=int, default=5000)
    return parser.parse_args()


def main() -> None:
    """Send, judge, print; exits with 1 if anything is wrong."""
    args = parsed()
    with (
        tempfile.TemporaryDirectory() as folder,
        server(args, *flags(Path(folder))) as running,
        httpx.Client(base_url=running.url, timeout=TIMEOUT_SECONDS, trust_env=False) as client,
    ):
        fuzz = Fuzz(client)
        began = time.monotonic()
        fuzz.run(args.cases, args.seed)
        show(fuzz.findings)
        left = fuzz.wait_until_idle()
        say(
            f"{fuzz.findings.cases} requests in {time.monotonic() - began:.0f} s; {left or 'nothing left behind'}"
        )
    raise SystemExit(1 if left or fuzz.findings.wrong else 0)


if __name__ == "__main__":
    main()
