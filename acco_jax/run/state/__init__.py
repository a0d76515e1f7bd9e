"""The state of a run on disk and across processes."""
