"""Callbacks for training libraries, one module each: import the one that you use.

`hookline.integrations.lightning`, `hookline.integrations.transformers` and
`hookline.integrations.accelerate` import their library; this package imports none.
"""
