"""Hooks in compiled code: guards, captures in the graph, calls of compiled modules."""
