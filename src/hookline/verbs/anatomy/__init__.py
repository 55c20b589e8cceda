"""Anatomy: the names of the parts of a transformer, proven by identities."""
