"""`python -m hookline.cli`: the same as the command `hookline`."""

from hookline.cli import main

main()
