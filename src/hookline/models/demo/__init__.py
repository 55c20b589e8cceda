"""The demo model: a digits classifier that hookline ships, so that it needs no download."""

from __future__ import annotations

from hookline.models.demo.digits import load_demo_digits as load_demo_digits
from hookline.models.demo.digits import load_digits_net as load_digits_net
from hookline.models.demo.digits import load_training_facts as load_training_facts
from hookline.models.demo.digits import preprocess_digit as preprocess_digit
