"""Run a model over a data set, and store the values at the wanted sites."""
