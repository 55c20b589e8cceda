"""What hookline costs, measured beside the bare model, a hand-written hook and other libraries.

`python -m benchmarks`, from the root of the repository, measures and prints the whole table.
"""
