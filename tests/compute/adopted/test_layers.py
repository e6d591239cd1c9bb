from typing import Any

import pytest
import torch

from headrace.compute.adopted.agreement import first_step
from headrace.compute.adopted.attention import NAME, PagedStep, Recording, heard_by, register
from headrace.compute.adopted.layers import fuse
from headrace.compute.adopted.modules import replace
from headrace.compute.kernels import KernelsUnavailable, select
from headrace.compute.kv import PagedKV
from headrace.compute.step_interrupt import StepInterrupt, StepInterrupted
from tests.compute.adopted.models import logits, tiny
from tests.oracle.harness import pack

CPU = torch.device("cpu")

try:
    KERNELS = select("cpp", CPU)
except KernelsUnavailable as error:
    pytest.skip(str(error), allow_module_level=True)
