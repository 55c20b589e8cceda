"""The objects that torch calls, and the order in which they stand on a module."""
