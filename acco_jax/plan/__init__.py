"""Plan of a run without its hardware: chips, topologies and compiled schedules."""
