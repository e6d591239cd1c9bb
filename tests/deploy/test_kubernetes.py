"""The Helm chart renders, its manifests follow Kubernetes' schemas, and the server understands what they give it."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace.config import PARTS, ServerOptions, options
from tests.deploy.files import DEPLOY, METRIC, ROOT, module, read_yaml, version
from tests.deploy.test_metric_names import unknown
from tests.server.conftest import serving

CHART = DEPLOY / "helm" / "headrace"
PLAIN = DEPLOY / "kubernetes" / "headrace.yaml"
VERSIONS = ("1.25", "1.30", "1.37")
CUSTOM = ("ScaledObject", "ServiceMonitor")
"""Kinds of other projects, whose schemas are not Kubernetes'."""

EVERYTHING: dict[str, Any] = {
    "replicas": 2,
    "model": "Qwen/Qwen3-0.6B",
    "config": {"max-num-seqs": 32, "response-cache": ["memory"]},
    "tenants": {"tenants": {"acme": {"weight": 4}}},
    "apiKeys": {"keys": "secret-one acme\nsecret-two\n"},
    "huggingFace": {"tokenSecret": "hub"},
    "cache": {"type": "ephemeral", "size": "50Gi", "storageClass": "fast"},
    "diskTier": {"enabled": True, "size": "16Gi"},
    "imagePullSecrets": [{"name": "registry"}],
    "service": {"annotations": {"a": "b"}},
    "serviceAccount": {"annotations": {"a": "b"}},
    "podAnnotations": {"a": "b"},
    "podLabels": {"team": "ml"},
    "nodeSelector": {"kubernetes.io/arch": "amd64"},
    "tolerations": [{"key": "dedicated", "operator": "Exists"}],
    "affinity": {"podAntiAffinity": {}},
    "topologySpreadConstraints": [
        {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}
    ],
    "networkPolicy": {
        "enabled": True,
        "from": [{"namespaceSelector": {"matchLabels": {"team": "apps"}}}],
    },
    "extraArgs": ["--profile=throughput"],
    "extraEnv": [{"name": "OMP_NUM_THREADS", "value": "4"}],
}
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "everything": EVERYTHING,
    "autoscaled": {"autoscaling": {"enabled": True}},
    "keda": {"autoscaling": {"enabled": True, "source": "keda"}},
    "claim": {
        "cache": {"type": "existingClaim", "existingClaim": "models"},
        "diskTier": {"enabled": True, "size": "512Mi"},
    },
    "operator": {
        "metrics": {"serviceMonitor": {"enabled": True, "labels": {"a": "b"}, "keySecret": "metrics"}},
        "apiKeys": {"existingSecret": "keys"},
        "serviceAccount": {"create": False},
        "podDisruptionBudget": {"enabled": False},
    },
}


def script() -> Any:
    module("helm_python")
    spec = importlib.util.spec_from_file_location("manifests", ROOT / "scripts" / "manifests.py")
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def documents(values: dict[str, Any], name: str = "headrace") -> dict[str, dict[str, Any]]:
    """The rendered manifests by kind; each kind appears once."""
    texts = script().render(values, name=name, namespace="models")
    found = [yaml.safe_load(text) for path, text in texts.items() if path.endswith(".yaml")]
    assert len({each["kind"] for each in found}) == len(found)
    return {each["kind"]: each for each in found}


def container(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    (only,) = found["Deployment"]["spec"]["template"]["spec"]["containers"]
    return only


def test_helm_lints_the_chart() -> None:
    report = module("helm_python").chart.lint(CHART, EVERYTHING, strict=True)
    assert report["errors"] == []
    assert [each for each in report["messages"] if each["severity"] > 1] == []


@pytest.mark.parametrize("kubernetes", VERSIONS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_manifests_follow_the_schemas(variant: str, kubernetes: str) -> None:
    validate = module("kubernetes_validate").validate
    for kind, document in documents(VARIANTS[variant]).items():
        if kind not in CUSTOM:
            validate(document, kubernetes, strict=True)


def test_a_wrong_manifest_is_found() -> None:
    package = module("kubernetes_validate")
    document = documents({})["Deployment"]
    document["spec"]["template"]["spec"]["enableServiceLink"] = False
    with pytest.raises(package.ValidationError):
        package.validate(document, VERSIONS[-1], strict=True)


@pytest.mark.parametrize("path", sorted((DEPLOY / "kubernetes").glob("*.yaml")), ids=lambda p: p.name)
def test_plain_manifests_follow_the_schemas(path: Path) -> None:
    for document in yaml.safe_load_all(path.read_text(encoding="utf-8")):
        if document.get("apiVersion", "kustomize").split("/")[0].split(".")[0] != "kustomize":
            module("kubernetes_validate").validate(document, VERSIONS[-1], strict=True)


def test_the_plain_manifest_is_what_the_chart_gives() -> None:
    assert PLAIN.read_text(encoding="utf-8") == script().page(), "python scripts/manifests.py"
    (image,) = read_yaml(PLAIN.with_name("kustomization.yaml"))["images"]
    assert image["newTag"] == version()


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_server_understands_its_arguments_and_files(variant: str, tmp_path: Path) -> None:
    found = documents(VARIANTS[variant])
    known = {each.name.replace("_", "-") for part in PARTS.values() for each in fields(part)} | {"config"}
    command, _, *flags = container(found)["args"]
    assert command == "serve"
    given = dict(flag.removeprefix("--").split("=", 1) for flag in flags)
    assert given.keys() <= known
    file = tmp_path / "headrace.yaml"
    file.write_text(found["ConfigMap"]["data"]["headrace.yaml"])
    merged = options(
        {name.replace("-", "_"): value for name, value in given.items() if name != "config"}, file
    )
    mounts = [each["mountPath"] for each in container(found)["volumeMounts"]]
    paths = [merged.server.api_key_file, merged.scheduler.tenants, merged.cache.kv_offload_path]
    assert all(any(path.startswith(f"{mount}/") for mount in mounts) for path in paths if path)


def test_values_reach_the_server() -> None:
    found = documents(EVERYTHING)
    args = container(found)["args"]
    assert args[1] == "Qwen/Qwen3-0.6B"
    assert f"--kv-offload-disk-bytes={16 * 2**30}" in args
    assert found["Secret"]["stringData"]["keys"] == EVERYTHING["apiKeys"]["keys"]
    assert "secret-one" not in yaml.safe_dump([found["Deployment"], found["ConfigMap"]])
    assert yaml.safe_load(found["ConfigMap"]["data"]["tenants.yaml"]) == EVERYTHING["tenants"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_pods_are_confined(variant: str) -> None:
    pod = documents(VARIANTS[variant])["Deployment"]["spec"]["template"]["spec"]
    (only,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["automountServiceAccountToken"] is False
    assert pod["enableServiceLinks"] is False
    assert only["securityContext"]["readOnlyRootFilesystem"] is True
    assert only["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert {"/cache", "/tmp"} <= {mount["mountPath"] for mount in only["volumeMounts"]}
    assert not any("subPath" in mount for mount in only["volumeMounts"])
    assert only["image"].endswith(f":{version()}")


def test_a_pod_has_time_to_drain() -> None:
    for drain, pause in ((30, 5), (300, 20)):
        found = documents({"drainSeconds": drain, "preStopSeconds": pause})
        pod = found["Deployment"]["spec"]["template"]["spec"]
        assert f"--drain-timeout={drain}" in container(found)["args"]
        assert pod["terminationGracePeriodSeconds"] > drain + pause
    assert f"--drain-timeout={ServerOptions().drain_timeout:g}" in container(documents({}))["args"]


def test_the_budget_and_the_service_select_the_pods() -> None:
    found = documents(EVERYTHING, name="blue")
    labels = found["Deployment"]["spec"]["template"]["metadata"]["labels"].items()
    assert found["Service"]["metadata"]["name"] == "blue-headrace"
    assert found["Service"]["spec"]["selector"].items() <= labels
    assert found["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"].items() <= labels
    assert found["Deployment"]["spec"]["selector"]["matchLabels"].items() <= labels
    (port,) = container(found)["ports"]
    assert found["Service"]["spec"]["ports"][0]["targetPort"] == port["name"]


def test_the_network_policy_admits_those_named_alone() -> None:
    found = documents(EVERYTHING)
    policy = found["NetworkPolicy"]["spec"]
    (rule,) = policy["ingress"]
    assert rule["from"] == EVERYTHING["networkPolicy"]["from"]
    assert rule["ports"] == [{"port": container(found)["ports"][0]["name"], "protocol": "TCP"}]
    labels = found["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert policy["podSelector"]["matchLabels"].items() <= labels.items()
    assert "NetworkPolicy" not in documents({})


def test_the_autoscaler_reads_the_metric_that_the_adapter_offers() -> None:
    (rule,) = read_yaml(DEPLOY / "kubernetes" / "prometheus-adapter.yaml")["rules"]["custom"]
    (series,) = METRIC.findall(rule["seriesQuery"])
    offered = re.sub(
        rule["name"]["matches"], rule["name"]["as"].replace("$1", r"\1"), f"headrace:{series[0]}"
    )
    found = documents(VARIANTS["autoscaled"])
    (metric,) = found["HorizontalPodAutoscaler"]["spec"]["metrics"]
    assert metric["pods"]["metric"]["name"] == offered == "headrace_num_requests_waiting"
    assert found["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]["name"] == "headrace"
    assert "replicas" not in found["Deployment"]["spec"]


def test_keda_asks_prometheus_for_a_metric_that_exists() -> None:
    (trigger,) = documents(VARIANTS["keda"])["ScaledObject"]["spec"]["triggers"]
    query = trigger["metadata"]["query"]
    assert 'namespace="models"' in query
    assert {match for match in unknown(query) if "{" not in match} == set()


def test_the_monitor_sets_the_job_that_alerts_expect() -> None:
    (endpoint,) = documents(VARIANTS["operator"])["ServiceMonitor"]["spec"]["endpoints"]
    assert {"targetLabel": "job", "replacement": "headrace"} in endpoint["relabelings"]
    assert endpoint["authorization"]["credentials"] == {"name": "metrics", "key": "key"}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"replica": 2}, "replica"),
        ({"image": {"tag": "latest"}}, "tag"),
        ({"cache": {"type": "existingClaim"}}, "cache.existingClaim"),
        ({**VARIANTS["claim"], "replicas": 2}, "one replica"),
        ({**VARIANTS["claim"], "autoscaling": {"enabled": True}}, "one replica"),
        ({"apiKeys": {"keys": "a", "existingSecret": "b"}}, "either existingSecret or keys"),
        ({"diskTier": {"enabled": True, "size": "10"}}, "size"),
        ({"networkPolicy": {"enabled": True}}, "networkPolicy"),
    ],
)
def test_values_that_cannot_work_are_refused(values: dict[str, Any], message: str) -> None:
    package = module("helm_python")
    with package.Chart.load(CHART) as chart, pytest.raises(package.HelmError, match=message):
        install(chart, values)


def install(chart: Any, values: dict[str, Any]) -> None:
    """What Helm does with values before it talks to a cluster."""
    chart.validate_schema(values)
    chart.render(values, name="headrace")


def test_probes_answer_without_a_key() -> None:
    probes = container(documents({}))
    paths = {probes[name]["httpGet"]["path"] for name in ("startupProbe", "livenessProbe", "readinessProbe")}
    with serving("--api-key", "a key") as server:
        assert {path: server.get(path).status_code for path in paths} == dict.fromkeys(paths, 200)
