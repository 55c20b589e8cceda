"""Private names of torch: nodes of autograd, fused operations, runs without numbers."""
