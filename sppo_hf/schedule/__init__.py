"""Schedules as data (actions, generators, validation, simulation); must not know torch."""
