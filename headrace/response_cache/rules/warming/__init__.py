"""Cache warming: which requests to compute ahead, and when.

- `demand_forecast`: how often a request is expected, from the times of its arrivals.
- `idle_detector`: whether arrivals are few enough for background work.
"""
