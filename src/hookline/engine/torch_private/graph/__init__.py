"""Private names of torch for autograd's nodes, checkpoints, and runs without numbers."""
