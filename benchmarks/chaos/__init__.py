"""Faults of every process behind the endpoint under load, and whether any accepted request notices."""
