"""Manifests for gateways, KServe and SkyPilot: they follow the schemas, and the server understands what they give it.

What embeds pods is checked with Kubernetes' own schemas, the rest with the fields that the projects document.
"""

from __future__ import annotations

import re
from copy import deepcopy
from dataclasses import fields
from typing import Any

import pytest
import yaml

from headrace.config import PARTS, options
from headrace.config.objects import read_kv_events
from tests.deploy.files import DEPLOY, module, read_yaml, version
from tests.server.conftest import serving

KUBERNETES = "1.37"
NAME = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"}
PORT = {"type": "integer", "minimum": 1, "maximum": 65535}


def closed(required: dict[str, Any], optional: dict[str, Any] | None = None) -> dict[str, Any]:
    """The schema of an object with these fields and no others."""
    return {
        "type": "object",
        "properties": required | (optional or {}),
        "required": list(required),
        "additionalProperties": False,
    }


def document(version: str, kind: str, spec: dict[str, Any]) -> dict[str, Any]:
    metadata = closed({"name": NAME}, {"annotations": {"type": "object"}})
    return closed(
        {"apiVersion": {"const": version}, "kind": {"const": kind}, "metadata": metadata, "spec": spec}
    )


LABELS = {"type": "object", "additionalProperties": {"type": "string"}, "minProperties": 1}
BACKEND = closed({"group": {"type": "string"}, "kind": {"type": "string"}, "name": NAME})
MATCH = closed({"path": closed({"type": {"enum": ["PathPrefix", "Exact"]}, "value": {"type": "string"}})})
RULE = closed(
    {"matches": {"type": "array", "items": MATCH}, "backendRefs": {"type": "array", "items": BACKEND}},
    {"timeouts": closed({"request": {"type": "string", "pattern": "^[0-9]+(h|m|s|ms)$"}})},
)
FORMAT = closed(
    {"name": {"type": "string"}, "version": {"type": "string"}, "autoSelect": {"type": "boolean"}}
)
SCHEMAS = {
    "InferencePool": document(
        "inference.networking.k8s.io/v1",
        "InferencePool",
        closed(
            {
                "selector": closed({"matchLabels": LABELS}),
                "targetPorts": {"type": "array", "items": closed({"number": PORT}), "maxItems": 8},
                "endpointPickerRef": closed(
                    {"name": NAME, "port": closed({"number": PORT})},
                    {"failureMode": {"enum": ["FailOpen", "FailClose"]}},
                ),
            }
        ),
    ),
    "HTTPRoute": document(
        "gateway.networking.k8s.io/v1",
        "HTTPRoute",
        closed(
            {
                "parentRefs": {"type": "array", "items": closed({"name": NAME})},
                "rules": {"type": "array", "items": RULE},
            }
        ),
    ),
    "ServingRuntime": document(
        "serving.kserve.io/v1alpha1",
        "ServingRuntime",
        closed(
            {
                "supportedModelFormats": {"type": "array", "items": FORMAT},
                "protocolVersions": {"type": "array", "items": {"enum": ["v1", "v2"]}},
                "containers": {"type": "array", "minItems": 1},
            },
            {"annotations": LABELS, "volumes": {"type": "array"}},
        ),
    ),
    "InferenceService": document(
        "serving.kserve.io/v1beta1",
        "InferenceService",
        closed(
            {
                "predictor": closed(
                    {
                        "model": closed(
                            {
                                "runtime": NAME,
                                "modelFormat": closed({"name": {"type": "string"}}),
                                "storageUri": {"type": "string", "pattern": "^[a-z0-9]+://"},
                            }
                        )
                    },
                    {
                        "minReplicas": {"type": "integer", "minimum": 0},
                        "maxReplicas": {"type": "integer", "minimum": 1},
                        "terminationGracePeriodSeconds": {"type": "integer"},
                    },
                )
            }
        ),
    ),
}


def manifests(path: str) -> dict[str, dict[str, Any]]:
    """The documents of a file by kind."""
    return {each["kind"]: each for each in yaml.safe_load_all((DEPLOY / path).read_text(encoding="utf-8"))}


def patched() -> dict[str, Any]:
    """The Deployment of the plain manifests with the patch of the gateway's kustomization."""
    (patch,) = read_yaml(DEPLOY / "gateway" / "kustomization.yaml")["patches"]
    found = deepcopy(manifests("kubernetes/headrace.yaml")[patch["target"]["kind"]])
    assert found["metadata"]["name"] == patch["target"]["name"]
    for operation in yaml.safe_load(patch["patch"]):
        *way, last = [part.replace("~1", "/") for part in operation["path"].split("/")[1:]]
        at: Any = found
        for part in way:
            at = at[int(part)] if isinstance(at, list) else at[part]
        if isinstance(at, list):
            assert last == "-"
            at.append(operation["value"])
        else:
            assert (operation["op"] == "replace") == (last in at), "add must not hide what is there"
            at[last] = operation["value"]
    return found


def check_arguments(args: list[str]) -> dict[str, str]:
    """Check that the server knows all options; returns them."""
    command, _, *flags = args
    assert command == "serve"
    given = dict(flag.removeprefix("--").split("=", 1) for flag in flags)
    known = {each.name.replace("_", "-") for part in PARTS.values() for each in fields(part)} | {"config"}
    assert given.keys() <= known
    values = {name.replace("-", "_"): value for name, value in given.items() if name != "config"}
    options(values)
    return given


@pytest.mark.parametrize("path", ["gateway/inference-pool.yaml", "kserve/headrace.yaml"])
def test_manifests_follow_the_schemas(path: str) -> None:
    validate = module("jsonschema").validate
    for kind, found in manifests(path).items():
        validate(found, SCHEMAS[kind])


def test_a_wrong_manifest_is_found() -> None:
    package = module("jsonschema")
    pool = manifests("gateway/inference-pool.yaml")["InferencePool"]
    pool["spec"]["targetPortNumber"] = 8000
    with pytest.raises(package.ValidationError, match="targetPortNumber"):
        package.validate(pool, SCHEMAS["InferencePool"])


def test_the_patched_deployment_follows_kubernetes_schema_and_the_server_understands_it() -> None:
    found = patched()
    module("kubernetes_validate").validate(found, KUBERNETES, strict=True)
    (container,) = found["spec"]["template"]["spec"]["containers"]
    given = check_arguments(container["args"])
    events = read_kv_events("kv-events-config", given["kv-events-config"])
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert events.endpoint == f"tcp://*:{ports['kv-events']}"
    assert re.fullmatch(r"kv@\$\(POD_IP\):8000@builtin", events.topic)
    assert [each["name"] for each in container["env"]] == ["POD_IP"], "the topic names it"


def test_the_pool_selects_the_pods_and_their_port() -> None:
    pool = manifests("gateway/inference-pool.yaml")["InferencePool"]["spec"]
    template = patched()["spec"]["template"]
    assert pool["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    (port,) = pool["targetPorts"]
    assert port["number"] in {each["containerPort"] for each in template["spec"]["containers"][0]["ports"]}
    (backend,) = manifests("gateway/inference-pool.yaml")["HTTPRoute"]["spec"]["rules"][0]["backendRefs"]
    assert backend["name"] == manifests("gateway/inference-pool.yaml")["InferencePool"]["metadata"]["name"]


def test_the_pickers_plugins_are_declared_before_they_are_used() -> None:
    config = read_yaml(DEPLOY / "gateway" / "endpoint-picker.yaml")
    declared = {each["type"] for each in config["plugins"]}
    (profile,) = config["schedulingProfiles"]
    assert {each["pluginRef"] for each in profile["plugins"]} == declared


def test_the_runtimes_pod_follows_kubernetes_schema_and_the_server_understands_it() -> None:
    runtime = manifests("kserve/headrace.yaml")["ServingRuntime"]["spec"]
    (container,) = runtime["containers"]
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "headrace"},
        "spec": {"containers": [container], "volumes": runtime["volumes"]},
    }
    module("kubernetes_validate").validate(pod, KUBERNETES, strict=True)
    given = check_arguments(container["args"])
    assert container["name"] == "kserve-container", "KServe looks for this name"
    assert container["image"].endswith(f":{version()}")
    assert int(given["port"]) == container["ports"][0]["containerPort"]
    assert runtime["annotations"]["prometheus.kserve.io/port"] == given["port"]
    predictor = manifests("kserve/headrace.yaml")["InferenceService"]["spec"]["predictor"]
    assert predictor["terminationGracePeriodSeconds"] > float(given["drain-timeout"])
    assert (
        predictor["model"]["runtime"]
        == manifests("kserve/headrace.yaml")["ServingRuntime"]["metadata"]["name"]
    )
    assert predictor["model"]["modelFormat"]["name"] in {
        each["name"] for each in runtime["supportedModelFormats"]
    }


def test_the_task_for_skypilot_starts_a_server_on_its_port() -> None:
    task = read_yaml(DEPLOY / "skypilot" / "headrace.yaml")
    assert task.keys() == {"name", "envs", "resources", "service", "setup", "run"}
    words = task["run"].split()
    args = words[words.index("serve") :]
    pairs = [f"{flag}={value}" for flag, value in zip(args[2::2], args[3::2], strict=True)]
    given = check_arguments([*args[:2], *pairs])
    assert int(given["port"]) == task["resources"]["ports"]
    assert "$MODEL" in args[1]


def test_the_server_offers_what_a_picker_reads() -> None:
    with serving("--metrics-prefix", "vllm") as server:
        for path in ("/readyz", "/livez"):
            assert server.get(path).status_code == 200
        text = server.get("/metrics").text
    for name in ("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc"):
        assert f"# TYPE vllm:{name} gauge" in text
    assert re.search(r'vllm:cache_config_info\{[^}]*block_size="16"[^}]*num_gpu_blocks="\d+"', text)
