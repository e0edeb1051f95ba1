"""Benchmarks: both sides alternate in one process; medians and ratios, with every setting."""
