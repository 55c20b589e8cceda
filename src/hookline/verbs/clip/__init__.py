"""Limit the gradients of values and parameters, each at its site."""
