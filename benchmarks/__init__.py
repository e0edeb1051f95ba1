"""Benchmarks.

Contestants alternate in one process; results are medians and ratios, with all settings.
"""
