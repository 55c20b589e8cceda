"""Compare two runs, and say where they part."""
