"""A line's lifetime: what it has put where, compiled borders, handles, its end."""
