"""Private names of torch: autograd's nodes, checkpoints, fused operations, runs without numbers."""
