"""Comparison of methods: runs side by side, tuning, results."""
