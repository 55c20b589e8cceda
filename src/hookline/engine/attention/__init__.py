"""Attention in all the forms that models write: its two products, and the pattern between them."""
