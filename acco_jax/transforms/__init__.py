"""Methods whose workers share one point: each is one file."""
