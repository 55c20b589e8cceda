"""Run the command `hookline` as `python -m hookline`, or on ranks: `torchrun -m hookline`."""


def main() -> None:
    """Run the command."""
    from hookline.cli import main as command

    command()


main()
