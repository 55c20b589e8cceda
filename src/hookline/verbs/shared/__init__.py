"""What verbs share: run a model, end a line, find the module that failed."""
