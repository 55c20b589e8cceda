"""Data of any kind as batches by number."""
