"""Write ``deploy/kubernetes/headrace.yaml``: the Helm chart with its default values, for use without Helm.

``python scripts/manifests.py`` needs the extra ``deploy``; a test fails while the file is not what the chart gives.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import helm_python
import yaml

ROOT = Path(__file__).parents[1]
CHART = ROOT / "deploy" / "helm" / "headrace"
FILE = ROOT / "deploy" / "kubernetes" / "headrace.yaml"

HEAD = """\
# Headrace with the built-in model, one replica and no API key. Written by scripts/manifests.py from the Helm chart
# in deploy/helm/headrace: change the chart, or overlay this file with kustomize.
"""


def render(values: dict[str, Any], name: str = "headrace", namespace: str = "default") -> dict[str, str]:
    """The chart's manifests with ``values``, by template; templates that give nothing are left out."""
    with helm_python.Chart.load(CHART) as chart:
        rendered = chart.render(values, name=name, namespace=namespace)
    return {path: text.strip() for path, text in sorted(rendered.items()) if text.strip()}


def page() -> str:
    """The file's text: labels that say "managed by Helm" are dropped."""
    texts = [text for path, text in render({}).items() if path.endswith(".yaml")]
    documents = "\n---\n".join(texts)
    lines = [line for line in documents.splitlines() if "managed-by:" not in line and "helm.sh/" not in line]
    for document in yaml.safe_load_all("\n".join(lines)):
        assert document["kind"]
    return HEAD + "\n".join(lines) + "\n"


if __name__ == "__main__":
    FILE.write_text(page(), encoding="utf-8")
