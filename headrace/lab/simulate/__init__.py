"""The same engine in virtual time: what a workload would see of it on a device that need not be there."""
