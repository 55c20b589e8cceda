"""Small helpers that the standard library lacks: locks, weak maps, whole files, a stopwatch."""
