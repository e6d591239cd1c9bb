"""A server whose keys, tenants and log level change while it serves; and what is left after its end."""

import re
import signal
import threading

import pytest

from tests.server.conftest import serving
from tests.server.test_lifecycle import begin_stream, read_to_end
from tests.waiting import eventually

PATH = "/v1/completions"
SHORT = {"prompt": "Once upon a time", "max_tokens": 4}
LONG = {"prompt": "Once upon a time", "max_tokens": 1500, "ignore_eos": True}


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


def status(server, key, method="get", path="/v1/models"):
    return getattr(server, method)(path, headers=bearer(key)).status_code


class Clients:
    """Clients that send requests one after the other, with the key that is valid at that time."""

    def __init__(self, server, key, number=24):
        self.key = key
        self.statuses = []
        self._answered = [""] * number  # the key of each client's last answered request
        self._server = server
        self._end = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(each,)) for each in range(number)]

    def _run(self, client):
        while not self._end.is_set():
            key = self.key
            answer = self._server.post(PATH, SHORT, headers=bearer(key))
            self.statuses.append(answer.status_code)
            self._answered[client] = key

    def wait(self, more):
        """Wait until so many more requests have been answered, and each client has used the present key."""
        enough = len(self.statuses) + more
        eventually(lambda: len(self.statuses) >= enough and set(self._answered) == {self.key})

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error):
        self._end.set()
        for thread in self._threads:
            thread.join(60)


def test_a_key_is_rotated_under_load_without_a_failed_request(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("old-key acme\n")
    with serving("--api-key-file", str(keys)) as server:
        stream = begin_stream(server.url, LONG, **bearer("old-key"))
        stream.recv(100)
        with Clients(server, "old-key") as clients:
            clients.wait(100)
            keys.write_text("old-key acme\nnew-key acme\n")
            server.process.send_signal(signal.SIGHUP)
            eventually(lambda: status(server, "new-key") == 200)
            clients.key = "new-key"
            clients.wait(100)
            keys.write_text("new-key acme\n")
            server.process.send_signal(signal.SIGHUP)
            eventually(lambda: status(server, "old-key") == 401)
            clients.wait(10)
        assert len(clients.statuses) >= 200
        assert set(clients.statuses) == {200}
        assert '"finish_reason":"length"' in read_to_end(stream), "a stream of the old key goes on to its end"
        assert not any("old-key" in line or "new-key" in line for line in server.lines)


def test_a_key_file_that_changes_is_read_again_and_a_broken_one_is_not_used(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("first acme\n")
    with serving("--api-key-file", str(keys), "--admin-key", "root") as server:
        keys.write_text("second acme\nreader - metrics\n")
        eventually(lambda: status(server, "second") == 200)
        assert status(server, "first") == 401
        assert status(server, "reader", path="/metrics") == 200
        assert status(server, "root", "post", "/reset_prefix_cache") == 200
        keys.write_text("third acme no-such-role\n")
        eventually(lambda: any("not reloaded" in line for line in server.lines))
        assert status(server, "second") == 200
        assert status(server, "third") == 401
        assert not any("third" in line for line in server.lines)


def test_tenants_and_the_log_level_are_read_again(tmp_path):
    tenants, config = tmp_path / "tenants.yaml", tmp_path / "serve.yaml"
    tenants.write_text("tenants: {acme: {requests_per_minute: 1}}\n")
    config.write_text(f"tenants: {tenants}\nlog-level: info\n")
    acme = {"X-Tenant-Id": "acme"}

    def served():
        return server.post(PATH, SHORT, headers=acme).status_code

    with serving("--config", str(config)) as server:
        assert [served(), served()] == [200, 429]
        server.get("/health")
        server.get("/v1/models")
        eventually(lambda: any("/v1/models" in line for line in server.lines))  # they are logged in batches
        tenants.write_text("tenants: {acme: {requests_per_minute: 100, weight: 4}}\n")
        config.write_text(f"tenants: {tenants}\nlog-level: debug\nmax-num-seqs: 2\n")
        server.process.send_signal(signal.SIGHUP)
        eventually(lambda: served() == 200)
        eventually(lambda: any("tenants reloaded" in line for line in server.lines))
        assert any("need a restart: --max-num-seqs" in line for line in server.lines)
        assert not any("/health" in line for line in server.lines)
        server.get("/health")  # probes are logged at the level debug
        eventually(lambda: any("/health" in line for line in server.lines))
        tenants.write_text("tenants: {acme: {requests_per_minute: none}}\n")
        server.process.send_signal(signal.SIGHUP)
        eventually(lambda: any("tenants not reloaded" in line for line in server.lines))
        assert served() == 200


def test_the_metrics_port_serves_metrics_and_health_alone():
    with serving("--api-key", "alpha", "--metrics-port", "0", "--log-format", "text") as server:
        assert status(server, "alpha", path="/metrics") == 403
        (line,) = [line for line in server.lines if "metrics port" in line]
        port = re.search(r"metrics port (\d+)", line)[1]
        server.url = f"http://127.0.0.1:{port}"
        assert "headrace:num_requests_running" in server.get("/metrics").text
        assert server.get("/health").status_code == 200
        for path in ("/v1/models", "/server_info", "/docs", "/v1/usage"):
            assert server.get(path, headers=bearer("alpha")).status_code == 404
        assert server.post("/reset_prefix_cache").status_code == 404


def test_sigterm_drains_saves_the_disk_tier_and_says_how_many_finished(tmp_path):
    flags = ["--kv-offload-path", str(tmp_path), "--kv-offload-disk-bytes", str(64 << 20)]
    with serving(*flags, "--drain-timeout", "60") as server:
        streams = [begin_stream(server.url, LONG | {"prompt": f"Story {n}"}) for n in range(3)]
        for stream in streams:
            stream.recv(100)
        server.process.send_signal(signal.SIGTERM)
        for stream in streams:
            assert '"finish_reason":"length"' in read_to_end(stream)
        assert server.end() == 0
        said = "".join(server.lines)
        assert re.search(r"drained_requests=[123] cancelled_requests=0", said)  # one may have ended before
        assert "server stopped finished_requests=3" in said
        assert any("blocks are saved on disk for the next run" in line for line in server.lines)


@pytest.mark.parametrize("saved", [False, True], ids=["first run", "after a saved run"])
def test_after_kill_9_a_server_starts_again_and_answers_correctly(tmp_path, saved):
    """Cached responses in SQLite survive. The KV blocks of the killed run do not; those of a saved run may."""
    store = f"sqlite:{tmp_path / 'responses.db'}"
    flags = ["--kv-offload-path", str(tmp_path / "kv"), "--kv-offload-disk-bytes", str(64 << 20)]
    flags += ["--response-cache", store, "--response-cache-timeout", "30"]  # a late lookup would be a miss
    body = {"prompt": "Once upon a time there was a small dog. " * 8, "temperature": 0, "max_tokens": 8}
    if saved:
        with serving(*flags) as server:
            server.post(PATH, body | {"prompt": "Another prompt with many words in it. " * 20})
            assert server.stop() == 0
    with serving(*flags) as server:
        answer = server.post(PATH, body).json()
        eventually(lambda: server.post(PATH, body).headers["X-Headrace-Cache"].startswith("hit"))
        stream = begin_stream(server.url, LONG)
        stream.recv(100)
        server.process.kill()
        server.process.wait()
        stream.close()
    with serving(*flags) as server:
        again = server.post(PATH, body)
        assert again.headers["X-Headrace-Cache"].startswith("hit")
        assert again.json()["choices"][0]["text"] == answer["choices"][0]["text"]
        computed = server.post(PATH, body, headers={"Cache-Control": "no-cache"}).json()
        assert computed["choices"][0]["text"] == answer["choices"][0]["text"]
