"""Change values and gradients as they flow."""
