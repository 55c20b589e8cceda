"""Taps: the objects whose methods torch calls as hooks, and their order on a module."""
