"""Resources of the process and the device, as metrics. A resource that cannot be measured has no metric.

- `work`: operations and bytes of steps, utilization of the peaks, and saturation, from events.
- `threads`: CPU time of each kind of thread. `traffic`: bytes and seconds of HTTP and text.
- `energy`: energy of the processor packages. `nvml`: memory, utilization and energy of an NVIDIA GPU.
- `meter`: the metrics of threads, device and energy.
"""
