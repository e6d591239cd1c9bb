"""The C++ kernels of the CPU, which are optional: without a compiler the package installs and computes with torch.

``pip install -e .`` builds them; ``python setup.py build_ext --inplace`` rebuilds them alone. Everything else about
the package is in ``pyproject.toml``.
"""

from glob import glob

from setuptools import Extension, setup

COMPILE_ARGS = ["-std=c++17", "-O3", "-pthread", "-fno-math-errno", "-fvisibility=hidden", "-g0"]
COMPILE_ARGS += ["-Wno-psabi", "-Wno-ignored-attributes"]

setup(
    ext_modules=[
        Extension(
            "headrace.compute.kernels._cpu",
            sources=sorted(glob("headrace/compute/kernels/csrc/*.cpp")),
            depends=sorted(glob("headrace/compute/kernels/csrc/*.h")),
            language="c++",
            extra_compile_args=COMPILE_ARGS,
            extra_link_args=["-pthread"],
            optional=True,
        )
    ]
)
