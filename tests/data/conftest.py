"""Use models by name, without a network."""

from named_models import (  # noqa: F401
    digits,
    linear,
    minilm,
    minilm_folder,
    no_network,
    picture,
    resnet18,
    rng_unchanged,
    said,
)
