"""Measure time, FLOPs and memory of each module, forward and backward."""
