"""Code that all commands share: devices, exit codes, files, signals."""
