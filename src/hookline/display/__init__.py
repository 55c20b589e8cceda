"""Text, units, colours and tables for results; independent of hookline's own types."""
