"""Paths of the peers, their environments and the models on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

HOME = Path("~/.cache/headrace/peers")


@dataclass(frozen=True, slots=True)
class Places:
    """Everything lies below ``home`` and can be deleted at any time."""

    home: Path

    def environment(self, peer: str) -> Path:
        """The virtual environment of a peer."""
        return self.home / peer / "venv"

    def python(self, peer: str) -> Path:
        """The interpreter of a peer's environment."""
        return self.environment(peer) / "bin/python"

    def model(self, shape: str) -> Path:
        """The folder of a shape's weights; what peers convert them to lies in it too."""
        return self.home / "models" / shape

    @property
    def llama_cpp_build(self) -> Path:
        """CMake's folder of llama.cpp; its programs are in ``bin``."""
        return self.home / "llama.cpp/build"
