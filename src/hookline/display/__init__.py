"""Text, units, colours, tables: how results are shown. Nothing here knows a type of hookline."""
