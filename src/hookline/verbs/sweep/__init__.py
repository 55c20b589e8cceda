"""hl.sweep and hl.attribute: one number for each of many changes, measured or estimated."""
