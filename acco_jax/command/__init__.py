"""What the commands share: devices, exit codes, files, signals."""
