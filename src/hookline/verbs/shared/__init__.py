"""The shared parts of verbs: run a model, end a line, find the module that failed."""
