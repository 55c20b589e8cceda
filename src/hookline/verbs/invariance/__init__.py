"""hl.invariance: which changes of a run leave its results the same."""
