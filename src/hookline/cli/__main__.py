"""Run the command `hookline` as `python -m hookline.cli`."""

from hookline.cli import main

main()
