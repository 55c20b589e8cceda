"""Locks, weak maps, hidden names: what Python lacks."""
