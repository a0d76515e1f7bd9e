"""The page of python -m acco_jax.report: what runs left in their folders, as HTML."""
