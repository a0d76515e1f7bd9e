"""The config of an experiment: fields, checks, command line, identity."""
