"""Taps on gradients: of what flows, and of parameters."""
