"""Small helpers that the standard library lacks: locks, weak maps, hidden names."""
