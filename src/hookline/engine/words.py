"""Words: numbers with their nouns, for messages. Imports nothing."""


def plural(number: int, one: str, many: str | None = None) -> str:
    """A number with its noun: `1 pass`, `2 passes`.

    >>> plural(2, "pass", "passes"), plural(1, "site")
    ('2 passes', '1 site')
    """
    return f"{number:,} {one if number == 1 else many or one + 's'}"
