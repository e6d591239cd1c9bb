"""Settings in advance: a sweep over values of one setting, and a search judged on a workload."""
