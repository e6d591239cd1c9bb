"""The pure core: requests, sequences, blocks, plans, policies and the loop.

Nothing here reads a clock, opens a file, draws a random number or knows torch. Time comes in as the
argument ``now`` (seconds), the device as a `Runner`, and everything that happens leaves as an `Event`.
"""
