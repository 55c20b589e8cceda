"""Whose memory a value lies in: what torch cannot tell of, and what must not be written to."""
