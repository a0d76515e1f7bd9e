"""Start a command by its name: python -m acco_jax COMMAND, the same as acco COMMAND."""

from acco_jax.cli import main

if __name__ == "__main__":
    main()
