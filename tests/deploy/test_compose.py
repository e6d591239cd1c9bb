"""The compose file follows the compose specification, and the files that it mounts fit each other."""

from __future__ import annotations

import json
import re

from headrace.config import ServerOptions, options
from tests.deploy.files import DASHBOARD, DEPLOY, PIP, PROMETHEUS, program, read_yaml, run, version

FILE = DEPLOY / "compose" / "compose.yaml"


def test_it_follows_the_specification() -> None:
    check = [program("check-jsonschema", PIP), "--builtin-schema", "vendor.compose-spec"]
    status, said = run([*check, str(FILE)])
    assert status == 0, said


def test_every_mounted_file_exists() -> None:
    compose = read_yaml(FILE)
    for service in compose["services"].values():
        for mount in service["volumes"]:
            source = mount.split(":")[0]
            if source.startswith("."):
                assert (FILE.parent / source).exists(), mount
            else:
                assert source in compose["volumes"], mount
    build = compose["services"]["headrace"]["build"]
    assert (FILE.parent / build["context"] / build["dockerfile"]).is_file()


def test_the_server_understands_its_flags_and_one_front_end_is_the_default() -> None:
    words = read_yaml(FILE)["services"]["headrace"]["command"]
    command, model, *flags = [re.sub(r"\$\{[A-Z_]+:-([^}]*)\}", r"\1", word) for word in words]
    assert (command, model) == ("serve", "builtin")
    given = dict(flag.removeprefix("--").replace("-", "_").split("=") for flag in flags)
    assert options({"model": model, **given}).server.api_server_count == 1


def test_services_are_confined() -> None:
    for name, service in read_yaml(FILE)["services"].items():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"]), name
        assert service["cap_drop"] == ["ALL"], name
        assert "no-new-privileges:true" in service["security_opt"], name
        tag = service["image"].rpartition(":")[2]
        assert tag != "latest"
        assert "." in tag, name
    headrace = read_yaml(FILE)["services"]["headrace"]
    assert headrace["read_only"] is True
    assert headrace["image"] == f"headrace:{version()}"
    assert int(headrace["stop_grace_period"].removesuffix("s")) > ServerOptions().drain_timeout


def test_prometheus_and_grafana_find_what_they_show() -> None:
    compose = read_yaml(FILE)["services"]
    (job,) = read_yaml(PROMETHEUS)["scrape_configs"]
    assert job["job_name"] == "headrace"
    assert job["static_configs"] == [{"targets": ["headrace:8000"]}]
    provisioning = FILE.parent / "grafana" / "provisioning"
    (source,) = read_yaml(provisioning / "datasources" / "prometheus.yaml")["datasources"]
    assert source["type"] == "prometheus"
    assert source["url"] == "http://prometheus:9090"
    (provider,) = read_yaml(provisioning / "dashboards" / "headrace.yaml")["providers"]
    folder = provider["options"]["path"]
    mounted = f"{folder}/{DASHBOARD.name}"
    assert f"../grafana/{DASHBOARD.name}:{mounted}:ro" in compose["grafana"]["volumes"]
    assert compose["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"] == mounted
    assert json.loads(DASHBOARD.read_text())["templating"]["list"][0]["query"] == source["type"]
