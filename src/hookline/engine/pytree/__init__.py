"""Tensors in nested values: walk, rebuild, get, put, describe."""
