"""Hold the version of hookline: here, and nowhere else."""

VERSION = "0.2.0"
