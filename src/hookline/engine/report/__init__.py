"""Reports: the sites that fired, and why others did not."""
