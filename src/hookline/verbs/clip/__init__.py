"""Bound values, gradients and gradients of parameters, each at its site."""
