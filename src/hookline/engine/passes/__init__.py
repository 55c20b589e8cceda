"""Which run of the model a value belongs to: calls, modes, checkpointing."""
