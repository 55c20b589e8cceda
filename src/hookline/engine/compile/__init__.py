"""What torch.compile needs: guards, captures in the graph, the border of compiled code."""
