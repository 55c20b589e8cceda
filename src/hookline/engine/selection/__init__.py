"""Sites, globs, selectors, the module tree, and what to say when nothing matches."""
