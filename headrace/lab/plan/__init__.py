"""Capacity planning: rooflines prune the possible fleets, the simulator confirms the cheapest. In reading order:

- `devices`, `shapes`, `roofline`: devices, models, and the two together.
- `launches`: a decode step on a GPU as its engine launches it.
- `drafts`, `sheet`: speculative decoding, and figures of one replica.
- `demand`, `capacity`, `search`: a workload, the request rate of a replica, the cheapest fleet.
- `sample`, `supply`: large fleets from a few replicas, and replicas in reserve for failures and spot machines.
- `report`: tables and lines.
"""
