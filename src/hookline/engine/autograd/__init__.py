"""Hooks on autograd's graph: aliases, views that are written to, the gradients of one call."""
