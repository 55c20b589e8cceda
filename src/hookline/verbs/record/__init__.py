"""Keep values and gradients as they flow."""
