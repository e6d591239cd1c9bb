"""A pytest plugin: the kernels on tiles, compiled with `emulated_tiles.h`, in place of the built extension.

``HEADRACE_EMULATED`` names the extension's file.
"""

from __future__ import annotations

import importlib.util
import os
import sys

NAME = "headrace.compute.kernels._cpu"

_spec = importlib.util.spec_from_file_location(NAME, os.environ["HEADRACE_EMULATED"])
assert _spec is not None
assert _spec.loader is not None
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)
sys.modules[NAME] = _module
