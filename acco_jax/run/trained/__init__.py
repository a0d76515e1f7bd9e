"""Trained runs: loaded, read as language models, exported."""
