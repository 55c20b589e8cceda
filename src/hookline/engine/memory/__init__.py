"""Memory that changes without a version counter, and values that must not be written to."""
