"""Devices as data: peak rates, efficiencies of engines, memory, and price per hour.

Peaks are the vendors' dense figures (without structured sparsity). Two efficiencies and the overhead of a step turn a
peak into what a good engine reaches; they are estimates, with sources. Prices are typical on-demand rates of 2026;
``--price`` overrides them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """One accelerator, or one small CPU server, for a roofline model.

    ``bf16_flops`` and ``int8_ops`` are peak operations per second of dense matrix products (a multiply-add counts as
    two). ``memory_bytes`` is the device's memory, ``bandwidth`` its peak in bytes per second, ``host_bandwidth`` the
    bytes per second to or from host memory, one way. ``efficiency_compute`` and ``efficiency_bandwidth`` are the shares
    of the peaks that an engine reaches. ``step_overhead_seconds`` is the time of a step beyond arithmetic and memory
    reads (launches, sampling, planning). ``dollars_per_hour`` is a list price. ``max_num_seqs`` is the engine's default
    on this device: about the number of sequences of 1,000 tokens that fit beside an 8-billion-parameter model.
    """

    name: str
    bf16_flops: float
    int8_ops: float
    memory_bytes: int
    bandwidth: float
    host_bandwidth: float
    efficiency_compute: float
    efficiency_bandwidth: float
    step_overhead_seconds: float
    dollars_per_hour: float
    max_num_seqs: int = 64

    @property
    def reached_bandwidth(self) -> float:
        """Memory bandwidth that an engine reaches, in bytes per second."""
        return self.bandwidth * self.efficiency_bandwidth


# Efficiencies of the GPUs. On an H200, matrix products alone reach 790 of 989 TFLOP/s and copies 4.3 of 4.8 TB/s
# (measured with torch): upper bounds of 0.80 and 0.90. Norms, rotary embeddings, attention and gaps between kernels
# reduce them. One stream of Llama-3.1-8B takes 6.44 ms per token on an H100 with vLLM 0.19 (its fp8 KV cache report,
# 2026). Reading 15.0 GB at 3.35 TB/s takes 4.48 ms; with 0.80 of the bandwidth and 0.8 ms per step it is 6.40 ms.

A100 = DeviceSpec(
    "A100-80G",
    bf16_flops=312e12,  # NVIDIA A100 80GB SXM data sheet
    int8_ops=624e12,  # the same
    memory_bytes=80 << 30,  # nvidia-smi: 81,920 MiB
    bandwidth=2.039e12,  # data sheet
    host_bandwidth=25e9,  # PCIe 4.0 x16: 31.5 GB/s less the protocol
    efficiency_compute=0.65,  # older and slower, so launches weigh less than on Hopper
    efficiency_bandwidth=0.80,
    step_overhead_seconds=0.8e-3,
    max_num_seqs=512,
    dollars_per_hour=1.79,  # between the specialised clouds (1.10-1.50) and the large ones (1.50-3.00), May 2026
)

H100 = DeviceSpec(
    "H100-SXM",
    bf16_flops=989.4e12,  # NVIDIA H100 data sheet: 1,979 with sparsity
    int8_ops=1_979e12,  # 3,958 with sparsity
    memory_bytes=81_559 << 20,  # nvidia-smi
    bandwidth=3.35e12,  # data sheet
    host_bandwidth=50e9,  # PCIe 5.0 x16: 63 GB/s less the protocol
    efficiency_compute=0.60,
    efficiency_bandwidth=0.80,
    step_overhead_seconds=0.8e-3,
    max_num_seqs=512,
    dollars_per_hour=2.99,  # median of 37 providers, May 2026
)

H200 = DeviceSpec(
    "H200",
    bf16_flops=989.4e12,  # NVIDIA H200 data sheet: the H100's arithmetic
    int8_ops=1_979e12,
    memory_bytes=143_771 << 20,  # nvidia-smi; sold as 141 GB
    bandwidth=4.8e12,  # data sheet
    host_bandwidth=50e9,  # PCIe 5.0 x16
    efficiency_compute=0.60,
    efficiency_bandwidth=0.80,
    step_overhead_seconds=0.8e-3,
    max_num_seqs=1024,
    dollars_per_hour=3.99,  # specialised clouds 3.50-4.50, May 2026
)

MI300X = DeviceSpec(
    "MI300X",
    bf16_flops=1_307.4e12,  # AMD MI300X data sheet
    int8_ops=2_614.9e12,
    memory_bytes=192 << 30,  # data sheet: 192 GB of HBM3
    bandwidth=5.3e12,
    host_bandwidth=50e9,  # PCIe 5.0 x16
    efficiency_compute=0.45,  # matrix libraries reach about half of the peak; portable attention kernels less
    efficiency_bandwidth=0.70,  # copies reach about 0.8; vLLM's portable kernels take 1.3 times AMD's own (Feb 2026)
    step_overhead_seconds=1.0e-3,
    max_num_seqs=1024,
    dollars_per_hour=2.49,  # 1.71-3.00, 2026
)

CPU = DeviceSpec(
    "cpu",  # two cores of a server processor with AMX (Sapphire Rapids), measured with torch and oneDNN
    bf16_flops=1.5e12,  # bf16 tiles, two threads
    int8_ops=4.0e12,  # int8 tiles, two threads
    memory_bytes=24 << 30,
    bandwidth=29e9,  # reading, two threads: 28-31 GB/s
    host_bandwidth=14e9,  # its own memory: a copy reads and writes
    efficiency_compute=0.60,  # prefill of Qwen3-0.6B: 0.9-1.0 TFLOP/s
    efficiency_bandwidth=0.75,  # decoding one stream: 66-80 % (OpenVINO 2026.4)
    step_overhead_seconds=2.0e-3,
    dollars_per_hour=0.10,  # two virtual cores of a cloud's compute-optimised kind
)

DEVICES: dict[str, DeviceSpec] = {device.name: device for device in (A100, H100, H200, MI300X, CPU)}
"""The built-in devices by name."""

BY_DRIVER_NAME: dict[str, DeviceSpec] = {
    "NVIDIA A100-SXM4-80GB": A100,
    "NVIDIA H100 80GB HBM3": H100,
    "NVIDIA H200": H200,
    "AMD Instinct MI300X": MI300X,
    "AMD Instinct MI300X OAM": MI300X,
    "AMD Instinct MI300X VF": MI300X,  # one whole device in a virtual machine
}
"""Devices by the whole name that their driver reports: a PCIe card, an NVL or a MIG slice has other figures."""


class UnknownDevice(ValueError):
    """A device that is not in `DEVICES`; the message lists the known ones."""


def device(name: str) -> DeviceSpec:
    """A built-in device by its name (case-insensitive).

    Raises:
        UnknownDevice: no device has this name.
    """
    for spec in DEVICES.values():
        if spec.name.lower() == name.lower():
            return spec
    raise UnknownDevice(f"there is no device {name!r}; known devices are {', '.join(DEVICES)}")
