"""Read what a model is given: data of any kind as batches, and an input by its name."""
