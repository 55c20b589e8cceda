"""The logit lens: what the model's head makes of the stream of each layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor

from hookline.display.results import Printout, Result
from hookline.display.text_table import Heading
from hookline.engine import gather_full
from hookline.errors import InputError, NotRecordedError
from hookline.recordings import PassRecord, Recording
from hookline.verbs.anatomy.embeddings_and_head import Head


@final
@dataclass(frozen=True, repr=False)
class Lens(Result):
    """Show the tokens that the model's head predicts from the stream of each layer (logit lens).

    Attributes:
        logits: the logits by layer: (rows, tokens, vocabulary).
        tokens: the tokens of the highest logits by layer, the highest first: (rows, tokens, n).
    """

    logits: dict[int, Tensor]
    tokens: dict[int, Tensor]

    def to_dict(self) -> dict[str, Any]:
        """Return the tokens of the highest logits by layer, for each row and token."""
        return {"tokens": {layer: ids.tolist() for layer, ids in self.tokens.items()}}

    def _table_rows(self) -> list[dict[str, Any]]:
        rows = []
        for layer, ids in self.tokens.items():
            top = _last_token_of_first_row(ids)
            shares = _last_token_of_first_row(self.logits[layer].softmax(-1))[top]
            rows.append({"layer": layer, "tokens": top.tolist(), "shares": shares.tolist()})
        return rows

    def _printout(self) -> Printout:
        return Printout(
            title="Lens",
            head=" of the last token of the first row: ids of the highest logits, and their shares",
            headings=(Heading("layer", "number"), Heading("tokens", "prose")),
            rows=[
                (
                    str(row["layer"]),
                    "  ".join(
                        f"{token} ({share:.2f})"
                        for token, share in zip(row["tokens"], row["shares"], strict=True)
                    ),
                )
                for row in self._table_rows()
            ],
            more="layers",
        )


def _last_token_of_first_row(values: Tensor) -> Tensor:
    """Return what a value has of the last token of the first row."""
    return values.reshape(-1, *values.shape[-2:])[0, -1]


def apply_head(
    head: Head, site_by_layer: Mapping[int, str], run: Recording | PassRecord, n: int
) -> Lens:
    """Apply a head to the streams of a run, given by layer as sites.

    Raises:
        NotRecordedError: the run has none of the streams.
        InputError: `n` is not 1 or more.
    """
    if not isinstance(n, int) or isinstance(n, bool) or n < 1:
        raise InputError(f"n must be a number of tokens, 1 or more, got {n!r}.\nThe default is 5.")
    recorded = {layer: run.tensor(site) for layer, site in site_by_layer.items() if site in run}
    logits = {layer: head(gather_full(stream)) for layer, stream in recorded.items()}
    if not logits:
        raise NotRecordedError(
            "the run must have resid_post of some layer, got none."
            '\nRecord it: with hl.record(model, parts["resid_post"]) as run: ...'
        )
    tokens = {
        layer: value.topk(min(n, value.shape[-1]), -1).indices for layer, value in logits.items()
    }
    return Lens(logits, tokens)
