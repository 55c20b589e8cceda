"""Print what flows while it flows, with times."""
