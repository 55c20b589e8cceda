"""Sites, globs, selectors, the module tree, and messages for selectors that match nothing."""
