"""Print each module as it runs, with times."""
