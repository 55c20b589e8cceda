"""Recordings that outgrow memory: shards by range of rows, and a manifest."""
