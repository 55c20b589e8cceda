"""Monitor training: statistics of activations, gradients, weights and updates by step."""
