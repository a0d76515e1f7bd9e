"""Metrics, progress, goodput and profiles of a run."""
