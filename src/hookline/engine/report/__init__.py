"""What fired, and why a site was silent."""
