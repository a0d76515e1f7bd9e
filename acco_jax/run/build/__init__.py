"""The mesh, model and optimizer that a config describes."""
