"""Private names of torch for the nodes of autograd's graph, and for runs without numbers."""
