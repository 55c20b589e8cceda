"""Small helpers that the standard library lacks: locks, weak maps, lazy imports, a stopwatch."""
