"""Gradients, their layout over the workers, and their exchange."""
