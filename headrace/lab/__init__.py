"""Workloads, the benchmark and its reports."""
