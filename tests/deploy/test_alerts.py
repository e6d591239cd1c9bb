"""Prometheus' own tool accepts the configuration and the rules, and each alert fires when it should."""

from __future__ import annotations

import subprocess
from pathlib import Path

import yaml

from tests.deploy.exported import metrics_page
from tests.deploy.files import ALERTS, DEPLOY, alert_rules, program, read_yaml
from tests.deploy.prometheus import PACKAGE

SERIES = Path(__file__).with_name("alerts_test.yml")


def promtool(*command: str, folder: Path = DEPLOY / "prometheus", text: str | None = None) -> str:
    done = subprocess.run(
        [program("promtool", PACKAGE), *command], cwd=folder, input=text, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_configuration_is_valid() -> None:
    assert "SUCCESS" in promtool("check", "config", "prometheus.yml")
    assert f"{len(alert_rules())} rules found" in promtool("check", "rules", "alerts.yml")


def test_pods_are_scraped_as_alerts_and_autoscalers_expect(tmp_path: Path) -> None:
    config = read_yaml(DEPLOY / "prometheus" / "kubernetes.yml")
    (job,) = config["scrape_configs"]
    assert job["job_name"] == "headrace"
    (discovery,) = job.pop("kubernetes_sd_configs")  # Debian's Prometheus is built without it
    assert discovery["role"] == "pod"
    key, _, value = discovery["selectors"][0]["label"].partition("=")
    manifests = list(yaml.safe_load_all((DEPLOY / "kubernetes" / "headrace.yaml").read_text()))
    (pod,) = [each["spec"]["template"] for each in manifests if each["kind"] == "Deployment"]
    assert pod["metadata"]["labels"][key] == value
    (rule,) = read_yaml(DEPLOY / "kubernetes" / "prometheus-adapter.yaml")["rules"]["custom"]
    assert {*rule["resources"]["overrides"]} <= {each.get("target_label") for each in job["relabel_configs"]}
    (tmp_path / "rest.yml").write_text(yaml.safe_dump(config | {"rule_files": [str(ALERTS)]}))
    assert "SUCCESS" in promtool("check", "config", "rest.yml", folder=tmp_path)


def test_the_metrics_page_is_valid() -> None:
    done = subprocess.run(
        [program("promtool", PACKAGE), "check", "metrics"], input=metrics_page().render(), capture_output=True
    )
    # Lint findings end with 3; the names are those that vLLM's dashboards read, colons included.
    complaints = [line for line in done.stderr.decode().splitlines() if "should not contain ':'" not in line]
    assert not [line for line in complaints if "error" in line], complaints
    assert done.returncode in (0, 3), complaints


def test_each_alert_fires_on_its_symptom_and_not_before() -> None:
    assert "SUCCESS" in promtool("test", "rules", SERIES.name, folder=SERIES.parent)


def test_each_alert_has_a_case_that_fires_and_one_that_does_not() -> None:
    cases = [case for test in read_yaml(SERIES)["tests"] for case in test["alert_rule_test"]]
    fires = {case["alertname"] for case in cases if case.get("exp_alerts")}
    quiet = {case["alertname"] for case in cases if not case.get("exp_alerts")}
    assert {rule["alert"] for rule in alert_rules()} == fires == quiet
    assert ALERTS.resolve() == (SERIES.parent / read_yaml(SERIES)["rule_files"][0]).resolve()
