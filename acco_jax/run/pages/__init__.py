"""Runs' results: the HTML page of acco_jax.report, the table of acco_jax.runs."""
