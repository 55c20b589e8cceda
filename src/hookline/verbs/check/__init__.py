"""The check: stop at the first NaN or infinity, and say who made it."""
