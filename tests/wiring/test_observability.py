from __future__ import annotations

import sys

import pytest

from headrace.config import ConfigError, ObservabilityOptions, options, read_systemd
from headrace.wiring.observability import open_traces


@pytest.mark.parametrize("endpoint", ["localhost:4318", "grpc://collector:4317", "http://", "collector"])
def test_an_endpoint_that_is_no_url_is_refused_with_an_example(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="give a URL such as http://localhost:4318/v1/traces"):
        open_traces(ObservabilityOptions(otlp_traces_endpoint=endpoint))


def test_without_the_packages_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "headrace.observe.tracing", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"pip install 'headrace\[otel\]'"):
        open_traces(ObservabilityOptions(otlp_traces_endpoint="http://localhost:4318"))


def test_without_the_option_there_are_no_traces() -> None:
    assert open_traces(ObservabilityOptions()) is None


def test_the_options_are_checked() -> None:
    given = options({"log_level": "debug", "log_format": "json", "access_log": False}).observability
    assert (given.log_level, given.log_format, given.access_log) == ("debug", "json", False)
    with pytest.raises(ConfigError, match="--log-level"):
        options({"log_level": "loud"})


def test_systemd_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"):
        monkeypatch.delenv(name, raising=False)
    read = read_systemd()
    assert (read.notify_socket, read.watchdog_seconds) == (None, None)
    monkeypatch.setenv("NOTIFY_SOCKET", "/run/notify")
    monkeypatch.setenv("WATCHDOG_USEC", "30000000")
    read = read_systemd()
    assert (read.notify_socket, read.watchdog_seconds) == ("/run/notify", 30.0)
    monkeypatch.setenv("WATCHDOG_PID", "1")  # meant for another process
    assert read_systemd().watchdog_seconds is None
