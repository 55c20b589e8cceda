"""Class maps: where in a picture a model sees a class."""
