#!/usr/bin/env python3
"""Compile every Triton kernel for every GPU that it is meant for, without one, and compare with the recorded sizes.

A kernel that needs more registers or shared memory than ``docs/data/kernels.json`` says, spills registers where it did
not, or does not fit its target fails the check. A kernel whose source, arguments, options and compiler are those of the
record is not compiled again, unless ``--all`` is given. ``--write`` records the sizes and writes their page,
``docs/concepts/gpu-kernels.md``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

os.environ.pop("TRITON_INTERPRET", None)  # before the kernels are imported
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from headrace.compute.kernels.triton import (  # noqa: E402
    adapters,
    attention,
    elementwise,
    experts,
    linear,
    recurrent,
    sampling,
)
from headrace.compute.kernels.triton.launches import shape_of  # noqa: E402
from headrace.compute.kernels.triton.mixtures import stages  # noqa: E402
from headrace.compute.kernels.triton.target import Target, power  # noqa: E402
from headrace.compute.sampling.penalties import IN_PROMPT  # noqa: E402
from headrace.compute.shared_keys import MOST_GROUPS, SHARED_TILE  # noqa: E402

RECORD = ROOT / "docs/data/kernels.json"
PAGE = ROOT / "docs/concepts/gpu-kernels.md"
TARGETS = {
    "sm_80": (GPUTarget("cuda", 80, 32), 163 << 10),
    "sm_90": (GPUTarget("cuda", 90, 32), 227 << 10),
    "sm_100": (GPUTarget("cuda", 100, 32), 227 << 10),
    "gfx942": (GPUTarget("hip", "gfx942", 64), 64 << 10),
}
TOLERANCE = 1.10
"""A tenth more registers is what another patch of the compiler may take."""
Sizes = dict[str, Any]
"""What a kernel takes on a target, and the key of what was compiled."""


class Case(NamedTuple):
    """A kernel with the types of its arguments, its constants and its options."""

    function: Any
    types: dict[str, str]
    constants: dict[str, Any]
    options: dict[str, int]


def attend(
    kind: str,
    shared: int,
    *,
    head_dim: int = 128,
    pages: str = "bf16",
    scaled: bool = False,
    split: bool = False,
    windowed: bool = False,
    capped: bool = False,
    sinks: bool = False,
    prefix: int = 0,
    tabled: bool = True,
    dtype: str = "bf16",
) -> Case:
    """Attention of a Llama-3.1-8B, whose four heads of queries share one of keys, unless said otherwise."""
    shape = shape_of(kind, 4, head_dim, 2, Target("", 132, shared))
    if prefix:
        shape = shape._replace(keys=min(shape.keys, SHARED_TILE))
    constants = {"KV_HEADS": 8, "GROUP": 4, "D": head_dim, "BLOCK_D": power(head_dim), "PAGE": 16}
    tabled = tabled and kind != "decode" and not prefix
    constants |= {"ROWS": shape.rows, "KEYS": shape.keys, "TABLED": tabled, "WINDOWED": windowed}
    constants |= {"CAPPED": capped, "SCALED": scaled, "SPLIT": split, "PREFIX": prefix, "SINKS": sinks}
    constants["GROUPS"] = MOST_GROUPS
    constants["WHOLE"] = shape.rows >= 64 and not windowed and not prefix
    constants["DOT"] = {"bf16": tl.bfloat16, "fp16": tl.float16}[dtype]
    out = "*fp32" if split else f"*{dtype}"
    scales = "*fp32" if scaled else f"*{pages}"
    types = {"queries": f"*{dtype}", "out": out, "sums": out, "keys": f"*{pages}", "values": f"*{pages}"}
    types |= {"key_scales": scales, "value_scales": scales, "scale": "fp32", "cap": "fp32", "sinks": "*fp32"}
    types |= dict.fromkeys(("tiles", "starts", "contexts", "tables", "common", "order", "groups"), "*i32")
    return Case(attention.attend, types, constants, {"num_warps": shape.warps, "num_stages": shape.stages})


def rope(pages: str, largest: int) -> Case:
    """Rotation and write of a Qwen3, which norms each head."""
    constants = {"HEADS": 16, "KV_HEADS": 8, "D": 128, "BLOCK_D": 128, "ROTARY": 128, "PAGE": 16}
    constants |= {"GATHERED": True, "NORM": 1, "LARGEST": largest, "TOGETHER": 8}
    types = {"qkv": "*bf16", "queries": "*bf16", "keys": f"*{pages}", "values": f"*{pages}", "eps": "fp32"}
    types |= dict.fromkeys(("key_scales", "value_scales", "rotation", "norms"), "*fp32")
    types |= dict.fromkeys(("positions", "slots"), "*i64")
    return Case(elementwise.rope_write, types, constants, {"num_warps": 4})


def multiply(
    bits: int,
    in_bytes: bool,
    rows: int,
    *,
    whole: bool = False,
    fp8: bool = False,
    minima: int = 0,
    fp4: bool = False,
) -> Case:
    """A product with a quantized weight, in groups of 128 with 4 bits, and of 32 with floats (``fp4``); or in groups of
    ``minima`` that have them.
    """
    stored = "fp8e4nv" if fp8 else "u8" if bits == 4 else "i8"
    given, integers = stored if in_bytes and fp8 else "i8" if in_bytes else "bf16", in_bytes and not fp8
    group, zeros = minima or (32 if fp4 else 128 if bits == 4 else 4096), bits == 4 and not (minima or fp4)
    constants = {"BITS": bits, "FP4": fp4, "INTEGERS": integers, "ZEROS": zeros, "MINIMA": minima > 0}
    constants["GROUP"] = group
    constants |= {
        "ROWS": rows,
        "COLUMNS": 64,
        "KEYS": minima or 128,
        "DOT": tl.int8 if integers else tl.bfloat16,
    }
    constants |= {"WHOLE": whole, "SCALED": in_bytes, "BIAS": True}
    types = {"x": f"*{given}", "values": f"*{stored}", "scales": "*fp32", "bias": "*bf16"}
    types |= {"zeros": "*i8" if zeros else "*fp32", "row_scales": "*fp32"}
    types["out"] = "*bf16" if whole else "*fp32"
    return Case(linear.multiply, types, constants, {"num_warps": 4, "num_stages": 3})


def grouped(
    shared: int,
    stored: str,
    rows: int,
    kind: int,
    *,
    in_bytes: bool = False,
    sorted_: bool = True,
    columns: int = 64,
) -> Case:
    """A product of 128 experts, of which a token has 8; ``stored``: bf16, i8, u8 (4 bits) or fp4 (MXFP4)."""
    bits = {"bf16": 16, "i8": 8}.get(stored, 4)
    keys = 64 if bits == 16 else 128
    constants = {
        "BITS": bits,
        "FP4": stored == "fp4",
        "INTEGERS": in_bytes,
        "ZEROS": stored == "u8",
        "MINIMA": False,
    }
    constants |= {"GROUP": {"fp4": 32, "u8": 128}.get(stored, 2048), "EXPERTS": 128, "EACH": 8, "ROWS": rows}
    constants |= {"COLUMNS": columns, "KEYS": keys, "EVEN": True, "SORTED": sorted_, "KIND": kind}
    constants |= {"DOT": tl.int8 if in_bytes else tl.bfloat16, "SCALED": in_bytes, "BIAS": stored == "fp4"}
    values = "*bf16" if bits == 16 else "*u8" if bits == 4 else "*i8"
    types = {"x": "*i8" if in_bytes else "*bf16", "values": values, "bias": "*bf16", "out": "*bf16"}
    types |= {"scales": values if bits == 16 else "*fp32", "zeros": "*i8" if stored == "u8" else values}
    types |= {"order": "*i32" if sorted_ else "*i64", "row_scales": "*fp32" if in_bytes else "*bf16"}
    types |= dict.fromkeys(("begins", "counts"), types["order"])
    options = {
        "num_warps": 8 if bits < 16 and rows == 64 else 4,
        "num_stages": stages(shared, plain=bits == 16),
    }
    return Case(experts.grouped, types, constants, options)


def routed() -> dict[str, Case]:
    """The router of 128 experts, and of 256 in groups; the sort of pairs, and the sum of results."""
    types = {"x": "*bf16", "weight": "*bf16", "bias": "*fp32", "out": "*fp32"}
    constants = {"BIAS": True, "EVEN": True, "ROWS": 16, "COLUMNS": 16, "KEYS": 128, "DOT": tl.bfloat16}
    given = {"logits": "*fp32", "correction": "*fp32", "slots": "*i64", "ids": "*i64", "weights": "*fp32"}
    given |= {"least": "fp32", "scale": "fp32"}
    few = {
        "EXPERTS": 128,
        "CHOSEN": 8,
        "COLUMNS": 8,
        "SIGMOID": False,
        "NORMALIZED": True,
        "CORRECTED": False,
    }
    few |= {"GROUPS": 1, "KEPT": 1, "GATED": False, "PADDED": True, "BLOCK_GROUPS": 1, "BLOCK_SIZE": 128}
    many = {"EXPERTS": 256, "COLUMNS": 9, "SIGMOID": True, "CORRECTED": True, "GROUPS": 8, "KEPT": 4}
    many |= {"BLOCK_GROUPS": 8, "BLOCK_SIZE": 32}
    sort = {"ids": "*i64", "owners": "*i64"} | dict.fromkeys(("order", "begins", "counts"), "*i32")
    plain = {"BLOCK": 1024, "EACH": 1, "OWNED": False}
    summed = dict.fromkeys(("parts", "beside", "residual", "out", "scales"), "*bf16")
    summed |= {"ids": "*i64", "weights": "*fp32", "norm": "*fp32", "eps": "fp32"}
    ends = {"EACH": 8, "BESIDE": False, "ADD": True, "NORMED": True, "LARGEST": 0, "BLOCK": 2048}
    return {
        "logits of experts": Case(experts.logits, types, constants, {"num_warps": 4, "num_stages": 3}),
        "choose experts": Case(experts.choose, given, few, {"num_warps": 1}),
        "choose experts, groups": Case(experts.choose, given, few | many, {"num_warps": 4}),
        "sort_pairs": Case(experts.sort_pairs, sort, plain, {"num_warps": 4}),
        "combine": Case(experts.combine, summed, ends, {"num_warps": 4}),
    }


def mixers(shared: int) -> dict[str, Case]:
    """The mixers of a Qwen3.5 (gated delta rule), a Nemotron (Mamba-2) and an LFM2 (short convolutions)."""
    types = dict.fromkeys(
        ("convolved", "states", "rate", "step_bias", "skip", "weight", "bias", "norm"), "*fp32"
    )
    types |= dict.fromkeys(("values", "keys", "results"), "*fp32")
    types |= dict.fromkeys(("x", "factors", "gates", "steps"), "*bf16") | {
        "slots": "*i64",
        "contexts": "*i32",
    }
    names = ("owners", "starts", "kept", "firsts", "middles", "chunk_starts", "chunk_counts")
    types |= dict.fromkeys(names, "*i32")
    types |= dict.fromkeys(("scale", "step_scale", "least", "most", "eps", "gate_scale"), "fp32")
    inner, ends = types | {"out": "*fp32"}, types | {"out": "*bf16"}
    taps = {"TAPS": 4, "BIAS": True, "PRODUCT": False, "ONE": True, "BLOCK": 256}
    delta = {"HEADS": 32, "SHARED": 2, "K": 128, "V": 128, "BLOCK_K": 128, "BLOCK_V": 64, "DELTA": True}
    space = delta | {"HEADS": 64, "SHARED": 8, "V": 64, "DELTA": False}
    chunks = {"CHUNK": 32, "PRECISION": "tf32" if shared > 64 << 10 else "ieee"}
    whole = {name: value for name, value in delta.items() if name != "DELTA"} | chunks | {"BLOCK_V": 128}
    kept = {"TAPS": 4, "BLOCK_TAPS": 4, "PRODUCT": False, "BLOCK": 256}
    normed = {"SIZE": 128, "NORMED": True, "FIRST": True, "BLOCK": 128}
    four = {"num_warps": 4}
    long = {"num_warps": 8, "num_stages": 1}
    return {
        "convolve, one token": Case(recurrent.convolve, inner, taps, four),
        "convolve": Case(recurrent.convolve, inner, taps | {"ONE": False}, four),
        "convolve, products": Case(recurrent.convolve, ends, taps | {"TAPS": 3, "PRODUCT": True}, four),
        "keep": Case(recurrent.keep, inner, kept, four),
        "one_token, delta rule": Case(recurrent.one_token, inner, delta, four),
        "one_token, Mamba-2": Case(recurrent.one_token, inner, space, four),
        "correct": Case(recurrent.correct, inner, whole, {"num_warps": 8}),
        "scan, delta rule": Case(recurrent.scan, inner, delta | chunks, long),
        "scan, Mamba-2": Case(recurrent.scan, inner, space | chunks, long),
        "finish": Case(recurrent.finish, ends, normed, four),
    }


def adapted() -> dict[str, Case]:
    """What adapters of rank 16 add, eight of them to 128 experts too."""
    types = dict.fromkeys(("x", "inner", "out"), "*bf16") | dict.fromkeys(
        ("tokens", "tiles", "table"), "*i64"
    )
    sizes = {"ROWS": 16, "RANKS": 16, "DOT": tl.bfloat16}
    shrunk, expanded = sizes | {"KEYS": 128, "EVEN": True, "EACH": 1}, sizes | {"COLUMNS": 64}
    sort = {"ids": "*i64"} | dict.fromkeys(("owners", "order", "begins", "counts"), "*i32")
    listed = {"begins": "*i32", "counts": "*i32", "tiles": "*i64"}
    pairs, four = types | {"tokens": "*i32"}, {"num_warps": 4}
    return {
        "shrink of adapters": Case(adapters.shrink, types, shrunk, four),
        "expand of adapters": Case(adapters.expand, types, expanded, four),
        "shrink of adapters of experts": Case(adapters.shrink, pairs, shrunk | {"EACH": 8}, four),
        "expand of adapters of experts": Case(adapters.expand, pairs, expanded, four),
        "sort_pairs of adapters": Case(
            experts.sort_pairs, sort, {"BLOCK": 1024, "EACH": 8, "OWNED": True}, four
        ),
        "list_tiles of adapters": Case(experts.list_tiles, listed, {"GROUPS": 1024, "ROWS": 16}, four),
    }


def row(function: Any, largest: int, block: int, warps: int, **constants: int) -> Case:
    """A kernel of whole rows: as they are, or in bytes up to ``largest``."""
    out = {0: "*bf16", 127: "*i8", 448: "*fp8e4nv"}[largest]
    types = dict.fromkeys(("x", "residual", "table", "gate_up"), "*bf16") | {"out": out, "scales": "*fp32"}
    types |= {"weight": "*fp32", "eps": "fp32", "scale": "fp32", "tokens": "*i32"}
    return Case(function, types, {**constants, "LARGEST": largest, "BLOCK": block}, {"num_warps": warps})


def cases(shared: int) -> dict[str, Case]:
    """Every kernel in every configuration that differs in its code, for a target's shared memory in bytes."""
    choice = {"logits": "*bf16", "out": "*i64", "top_k": "*i64"}
    choice |= dict.fromkeys(("temperature", "min_p", "top_p", "uniform"), "*fp64")
    joined = {"parts": "*fp32", "sums": "*fp32", "out": "*bf16", "sinks": "*fp32"}
    joined |= dict.fromkeys(("tiles", "starts", "contexts"), "*i32")
    sizes = {"KV_HEADS": 8, "GROUP": 4, "D": 128, "BLOCK_D": 128, "ROWS": 16, "TABLED": False, "PARTS": 16}
    added = {"parts": "*fp32", "row_scales": "*fp32", "bias": "*bf16", "out": "*bf16"}
    added |= {"sums": "*i32", "scales": "*fp32"}
    penalized = {"logits": "*fp32", "counts": "*i32"}
    penalized |= dict.fromkeys(("rows", "lanes", "drafts", "begins", "ends"), "*i64")
    penalized |= dict.fromkeys(("repetition", "presence", "frequency"), "*fp64")
    accepted = dict.fromkeys(("drawn", "drafts", "first", "offsets"), "*i64") | {"out": "*i1"}
    expanded = {"values": "*u8", "scales": "*fp32", "zeros": "*i8", "out": "*bf16"}
    whole = {"BITS": 4, "FP4": False, "BLOCK": 1024}
    return {
        "attend, decode": attend("decode", shared),
        "attend, decode, split": attend("decode", shared, split=True),
        "attend, decode, split, int8": attend("decode", shared, split=True, pages="i8", scaled=True),
        "attend, decode, split, fp8": attend("decode", shared, split=True, pages="fp8e4nv", scaled=True),
        "attend, decode, heads of 256": attend("decode", shared, head_dim=256, windowed=True, capped=True),
        "attend, decode of drafts, split": attend("mixed", shared, split=True, tabled=False),
        "attend, decode, behind a prefix": attend("decode", shared, split=True, prefix=2),
        "attend, prefill, prefix of many rows": attend("prefill", shared, split=True, prefix=1),
        "attend, mixed": attend("mixed", shared),
        "attend, prefill": attend("prefill", shared),
        "attend, prefill, int8": attend("prefill", shared, pages="i8", scaled=True),
        "attend, prefill, window": attend(
            "prefill", shared, head_dim=64, windowed=True, dtype="fp16", pages="fp16"
        ),
        "attend, prefill, heads of 256": attend("prefill", shared, head_dim=256, capped=True),
        "attend, decode, window, sinks": attend("decode", shared, head_dim=64, windowed=True, sinks=True),
        "attend, prefill, sinks": attend("prefill", shared, head_dim=64, sinks=True),
        "join": Case(attention.join, joined, sizes | {"SINKS": False}, {"num_warps": 4}),
        "join, sinks": Case(attention.join, joined, sizes | {"SINKS": True}, {"num_warps": 4}),
        "norm of a sum": row(elementwise.norm, 0, 4096, 8, ADD=True, NORMED=True),
        "norm of a sum, int8": row(elementwise.norm, 127, 4096, 8, ADD=True, NORMED=True),
        "norm of a sum, fp8": row(elementwise.norm, 448, 4096, 8, ADD=True, NORMED=True),
        "embed_norm": row(elementwise.embed_norm, 0, 4096, 8, SCALED=False, NORMED=True),
        "gated": row(elementwise.gated, 0, 1024, 4, KIND=0),
        "gated, int8": row(elementwise.gated, 127, 16384, 16, KIND=0),
        "gated, fp8": row(elementwise.gated, 448, 16384, 16, KIND=0),
        "rope_write": rope("bf16", 0),
        "rope_write, int8": rope("i8", 127),
        "rope_write, fp8": rope("fp8e4nv", 448),
        "likeliest": Case(sampling.likeliest, choice, {"BLOCK": 2048}, {"num_warps": 8}),
        "choose": Case(sampling.choose, choice, {"BLOCK": 512}, {"num_warps": 4}),
        "permit": Case(
            sampling.permit,
            {"logits": "*bf16", "out": "*bf16", "lines": "*i32", "words": "*i32"},
            {"BLOCK": 2048},
            {},
        ),
        "penalize": Case(sampling.penalize, penalized, {"IN_PROMPT": IN_PROMPT, "BLOCK": 2048}, {}),
        "accept": Case(sampling.accept, accepted, {}, {"num_warps": 1}),
        "rounded, int8": row(elementwise.rounded, 127, 4096, 8),
        "multiply, W4A16": multiply(4, False, 16),
        "multiply, W4A16, 64 rows": multiply(4, False, 64),
        "multiply, W4A16, whole": multiply(4, False, 16, whole=True),
        "multiply, W4A8": multiply(4, True, 16),
        "multiply, W4A16, minima": multiply(4, False, 16, minima=32),
        "multiply, W8A16, minima": multiply(8, False, 16, minima=16),
        "multiply, W8A8": multiply(8, True, 16),
        "multiply, W8A8, 64 rows": multiply(8, True, 64),
        "multiply, W8A16": multiply(8, False, 16),
        "multiply, fp8 W8A8": multiply(8, True, 16, fp8=True),
        "multiply, fp8 W8A16, 64 rows": multiply(8, False, 64, fp8=True),
        "add_parts": Case(linear.add_parts, added, {"SCALED": True, "BIAS": True, "BLOCK": 1024}, {}),
        "scale_sums": Case(linear.scale_sums, added, {"BIAS": True, "BLOCK": 1024}, {}),
        "expand": Case(linear.expand, expanded, whole | {"ZEROS": True, "MINIMA": False, "GROUP": 128}, {}),
        "expand, minima": Case(
            linear.expand,
            expanded | {"zeros": "*fp32"},
            whole | {"ZEROS": False, "MINIMA": True, "GROUP": 32},
            {},
        ),
        "multiply, MXFP4": multiply(4, False, 16, fp4=True),
        **routed(),
        **mixers(shared),
        **adapted(),
        "grouped, gate and up, one token": grouped(shared, "bf16", 16, 0, sorted_=False, columns=32),
        "grouped, gate and up": grouped(shared, "bf16", 16, 0),
        "grouped, down": grouped(shared, "bf16", 16, -1),
        "grouped, gate and up, prefill": grouped(shared, "bf16", 64, 0),
        "grouped, down, prefill": grouped(shared, "bf16", 64, -1),
        "grouped, gate and up, W4A16": grouped(shared, "u8", 16, 0),
        "grouped, gate and up, W4A16, 64 rows": grouped(shared, "u8", 64, 0),
        "grouped, gate and up, W8A16": grouped(shared, "i8", 16, 0),
        "grouped, gate and up, W8A8": grouped(shared, "i8", 16, 0, in_bytes=True),
        "grouped, gate and up, MXFP4": grouped(shared, "fp4", 16, 2),
        "grouped, gate and up, MXFP4, 64 rows": grouped(shared, "fp4", 64, 2),
        "grouped, down, MXFP4": grouped(shared, "fp4", 16, -1),
    }


def left_out(name: str, target: str) -> bool:
    """The type e4m3 of fp8 begins with sm_89; gfx942 has another one."""
    return "fp8" in name and target in ("sm_80", "gfx942")


class Build(NamedTuple):
    """A kernel as the compiler takes it."""

    source: ASTSource
    gpu: GPUTarget
    options: dict[str, int]

    @property
    def key(self) -> str:
        """Changes with whatever may change the code, and with the line at which a kernel begins."""
        parts = (
            triton.__version__,
            self.source.hash(),
            self.source.attrs,
            self.gpu,
            sorted(self.options.items()),
        )
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def build(name: str, target: str) -> Build:
    """What the compiler is given for a kernel and a target."""
    gpu, shared = TARGETS[target]
    function, types, constants, options = cases(shared)[name]
    names = function.arg_names
    signature = {each: "constexpr" if each in constants else types.get(each, "i32") for each in names}
    aligned = ("block_stride", "width", "vocab", "inputs", "outputs")
    attributes = {
        (place,): [["tt.divisibility", 16]]
        for place, each in enumerate(names)
        if (signature[each].startswith("*") or each in aligned) and not _any_alignment(function.params[place])
    }
    values = {(names.index(each),): value for each, value in constants.items()}
    return Build(ASTSource(function, signature, values, attributes), gpu, options)


def measure(name: str, target: str) -> Sizes:
    """Compile a kernel; registers per thread, shared memory and spilled registers of a thread in bytes."""
    source, gpu, options = given = build(name, target)
    built = triton.compile(source, target=gpu, options=options)
    found = {"shared": built.metadata.shared, "key": given.key}
    if gpu.backend == "hip":
        text = built.asm["amdgcn"]
        found["registers"] = int(re.findall(r"\.vgpr_count:\s+(\d+)", text)[0])
        found["spilled"] = 4 * int(re.findall(r"\.vgpr_spill_count:\s+(\d+)", text)[0])
    else:
        usage = _usage(built.asm["cubin"])
        found["registers"] = int(re.findall(r"REG:(\d+)", usage)[0])
        found["spilled"] = int(re.findall(r"STACK:(\d+)", usage)[0])
        found["wgmma"] = built.asm["ptx"].count("wgmma.mma_async")
    return found


def _any_alignment(argument: Any) -> bool:
    return bool(argument.do_not_specialize or argument.do_not_specialize_on_alignment)


def _usage(cubin: bytes) -> str:
    program = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run(
            [program, "-res-usage", file.name], check=True, capture_output=True, text=True
        ).stdout


def measure_all(known: Mapping[str, Mapping[str, Sizes]]) -> dict[str, dict[str, Sizes]]:
    """What every kernel takes on every target; what is ``known`` of the same source is not compiled."""
    pairs = [(name, target) for name in cases(1 << 20) for target in TARGETS if not left_out(name, target)]
    found = {pair: known.get(pair[0], {}).get(pair[1], {}) for pair in pairs}
    changed = [pair for pair, sizes in found.items() if sizes.get("key") != build(*pair).key]
    if changed:
        with ProcessPoolExecutor(2) as pool:
            found.update(zip(changed, pool.map(measure, *zip(*changed, strict=True)), strict=True))
    print(f"{len(changed)} of {len(pairs)} kernels compiled")
    table: dict[str, dict[str, Sizes]] = {}
    for (name, target), sizes in found.items():
        table.setdefault(name, {})[target] = sizes
    return table


def faults(table: dict[str, Any], record: dict[str, Any]) -> list[str]:
    """What cannot run, or is worse than recorded with the same Triton."""
    wrong = []
    comparable = record["triton"] == triton.__version__
    for name, targets in table.items():
        for target, sizes in targets.items():
            before = record["kernels"].get(name, {}).get(target)
            if before is None:
                wrong.append(f"{name} for {target} is not recorded; run scripts/kernel_gate.py --write")
                continue
            if sizes["shared"] > (limit := TARGETS[target][1]):
                wrong.append(f"{name} for {target} needs {sizes['shared']} bytes of {limit} shared")
            wrong += [
                f"{name} for {target}: {part} {sizes[part]}, recorded {before[part]}"
                for part in ("registers", "shared", "spilled")
                if comparable and sizes[part] > before[part] * TOLERANCE
            ]
            if "prefill" in name and target == "sm_90" and not sizes["wgmma"]:
                wrong.append(f"{name} for {target} does not use wgmma")
            if "decode" in name and comparable and sizes["spilled"] and target != "gfx942":
                wrong.append(f"{name} for {target} spills {sizes['spilled']} bytes a thread")
    return wrong


def page(record: dict[str, Any]) -> str:
    """The sizes as a page of the documentation."""
    head = " | ".join(TARGETS)
    lines = [
        "# GPU kernels",
        "",
        "This page is generated: `python scripts/kernel_gate.py --write`.",
        "",
        f"Each kernel of `--kernels triton` is compiled for each target with Triton {record['triton']}, without a GPU."
        " On an H200 they give what torch gives (`scripts/gpu_check`).",
        "A cell has the registers of a thread and the shared memory of a program in KiB. The bytes of a thread that do"
        " not fit its",
        "registers are in brackets. A test fails if a number grows, or if a kernel of prefill has no WGMMA on sm_90.",
        "",
        f"| kernel | {head} |",
        "|---|" + "---:|" * len(TARGETS),
    ]
    for name, targets in record["kernels"].items():
        cells = []
        for target in TARGETS:
            sizes = targets.get(target)
            if sizes is None:
                cells.append("-")
                continue
            spilled = f" [{sizes['spilled']}]" if sizes["spilled"] else ""
            cells.append(f"{sizes['registers']} / {sizes['shared'] / 1024:.0f}{spilled}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Compile and compare; exits with 1 if anything is worse."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="record the sizes and write the page")
    parser.add_argument("--all", action="store_true", help="compile also what is recorded of the same source")
    args = parser.parse_args()
    table = measure_all({} if args.all else json.loads(RECORD.read_text())["kernels"])
    if args.write:
        recorded = {"triton": triton.__version__, "kernels": table}
        RECORD.write_text(json.dumps(recorded, indent=1) + "\n")
        PAGE.write_text(page(recorded))
    record = json.loads(RECORD.read_text())
    wrong = faults(table, record)
    if page(record) != PAGE.read_text():
        wrong.append(f"{PAGE.relative_to(ROOT)} does not show what is recorded")
    print("\n".join(wrong) or "none is worse than recorded")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
