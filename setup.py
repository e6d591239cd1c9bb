"""The C++ kernels of the CPU, which are optional: without a compiler the package installs and computes with torch.

``pip install -e .`` builds them; ``python setup.py build_ext --inplace`` rebuilds them alone. Everything else about
the package is in ``pyproject.toml``.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from glob import glob
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

COMPILE_ARGS = ["-std=c++17", "-O3", "-pthread", "-fno-math-errno", "-fvisibility=hidden", "-g0"]
COMPILE_ARGS += ["-Wno-psabi", "-Wno-ignored-attributes"]
# A tenth of a kernel's speed depends on how its loops are aligned to cache lines. It must not depend on the code
# that is compiled before it.
COMPILE_ARGS += ["-falign-functions=64"]


class BuildSideBySide(build_ext):
    """Compiles the files of an extension side by side: each is a level of instructions, and takes ten seconds."""

    def build_extension(self, ext: Extension) -> None:
        compile_all = self.compiler.compile

        def compile_each(sources: list[str], *args: Any, **options: Any) -> list[str]:
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                objects = pool.map(lambda source: compile_all([source], *args, **options), sources)
                return [name for names in objects for name in names]

        self.compiler.compile = compile_each
        super().build_extension(ext)


setup(
    cmdclass={"build_ext": BuildSideBySide},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},  # the lowest Python that `pyproject.toml` allows
    ext_modules=[
        Extension(
            "headrace.compute.kernels._cpu",
            sources=sorted(glob("headrace/compute/kernels/csrc/*.cpp")),
            depends=sorted(glob("headrace/compute/kernels/csrc/*.h")),
            language="c++",
            extra_compile_args=COMPILE_ARGS,
            extra_link_args=["-pthread"],
            py_limited_api=True,
            optional=True,
        )
    ],
)
