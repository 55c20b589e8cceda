"""Shards of a value on this rank, and the rendezvous of the ranks."""
