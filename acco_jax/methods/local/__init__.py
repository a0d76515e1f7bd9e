"""Methods whose workers keep parameters of their own between two exchanges."""
