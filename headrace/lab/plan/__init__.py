"""Capacity planning: rooflines prune the possible fleets, the simulator confirms the cheapest. In reading order:

- `roofline`: devices, models, and the time of a step of a model on a device.
- `launches`: a decode step on a GPU as its engine launches it.
- `capacity`: a workload's demand, and the request rate of a replica, with or without speculative decoding.
- `search`: the cheapest fleet, its simulation by a few replicas, and replicas in reserve for failures.
- `report`: figures of one replica; tables and lines; dollars per million tokens by batching and utilization, and the
  break-even with an API.
"""
