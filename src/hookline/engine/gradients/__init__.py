"""Taps on gradients, eager and compiled."""
