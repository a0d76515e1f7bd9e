"""Schedules that a compiler made: what overlaps communication, and what it costs."""
