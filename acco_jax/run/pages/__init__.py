"""Page of python -m acco_jax.report: runs' results as HTML."""
