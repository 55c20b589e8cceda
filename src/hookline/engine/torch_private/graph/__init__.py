"""Wrap private names of torch: autograd's nodes, checkpoints, fused operations, shapes only."""
