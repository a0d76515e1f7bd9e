"""The command that starts, watches and restarts training processes."""
