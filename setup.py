"""The C++ kernels of the CPU, which are optional: without a compiler the package installs and computes with torch.

``pip install -e .`` builds them; ``python setup.py build_ext --inplace`` rebuilds them alone. Everything else about
the package is in ``pyproject.toml``.
"""

from glob import glob

from setuptools import Extension, setup

# -fopenmp is given to the compiler and not to the linker: OpenMP's symbols stay undefined and resolve to the
# runtime that torch has loaded, so that there is one pool of threads. One that we linked would be a second one.
COMPILE_ARGS = ["-std=c++17", "-O3", "-fopenmp", "-fno-math-errno", "-fvisibility=hidden", "-g0"]
COMPILE_ARGS += ["-Wno-psabi", "-Wno-ignored-attributes"]

setup(
    ext_modules=[
        Extension(
            "headrace.compute.kernels._cpu",
            sources=sorted(glob("headrace/compute/kernels/csrc/*.cpp")),
            depends=sorted(glob("headrace/compute/kernels/csrc/*.h")),
            language="c++",
            extra_compile_args=COMPILE_ARGS,
            optional=True,
        )
    ]
)
