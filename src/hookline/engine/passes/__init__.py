"""Passes: the run of the model that a value belongs to, with calls, modes and checkpointing."""
