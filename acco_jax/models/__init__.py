"""Models to train: pure functions of a parameter tree and a batch."""
