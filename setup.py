"""The C++ kernels of the CPU, which are optional: without a compiler the package installs and computes with torch.

``pip install -e .`` builds them; ``python setup.py build_ext --inplace`` rebuilds them alone. Everything else about
the package is in ``pyproject.toml``.
"""

from glob import glob

from setuptools import Extension, setup

# -fopenmp is given to the compiler and not to the linker: of OpenMP only the number of threads is asked for, and the
# symbol stays undefined, to resolve to the runtime that torch has loaded. One that we linked would not know torch's.
COMPILE_ARGS = ["-std=c++17", "-O3", "-fopenmp", "-pthread", "-fno-math-errno", "-fvisibility=hidden", "-g0"]
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
