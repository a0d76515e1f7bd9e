"""Weights of Hugging Face folders as the start of a run."""
