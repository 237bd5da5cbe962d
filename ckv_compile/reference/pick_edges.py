"""The edges of a new token, out of what its attention kept."""

from __future__ import annotations

import torch
from torch import Tensor

from ckv_compile.index_layout import candidate_slots, rest_slots
from ckv_compile.reference.nominal import layer_state

NO_ENTRY = -(2**63 - 1)  # below every entry


def edge_entries(score: Tensor, position: Tensor) -> Tensor:
    """int64 that orders by float32 score, and among equal scores by position; NO_ENTRY where position is negative."""
    bits = (score.float() + 0.0).view(torch.int32).long()
    bits = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    usable = (position >= 0) & (score > -torch.inf)
    return torch.where(usable, (bits << 32) | position.long(), NO_ENTRY)


def pick_edges(
    candidate: Tensor,
    candidate_score: Tensor,
    candidate_rest: Tensor,
    candidate_norm: Tensor,
    first: Tensor,
    num_layers: int,
    num_places: int,
    num_lists: int,
    budget: int,
    num_sink_tokens: int,
    kappa: int,
    source: str,
) -> tuple[Tensor, Tensor]:
    """The kappa best candidates that ``sparse_attention_edges`` has stored, in all layers.

    Flat state that is read, with E = ``candidate_slots(budget, num_sink_tokens)`` and R = ``rest_slots(kappa)``:
    candidate int32 [L, B, num_places, E], positions, -1 for none, each for num_lists / num_places lists; candidate_score
    float32 [L, B, num_lists, E], in base 2 (source "attention") or any order (source "keys"); candidate_rest int64
    [L, B, num_lists, R], further candidates as ``edge_entries``; candidate_norm float32 [L, B, num_lists], log2 of the sum
    of exp2(score) over all that was attended, read if the source is "attention". first: [B], of which only the size counts.
    Returns neighbor int32 [L, B, num_lists, kappa], positions of falling score, of equal ones the latest first, -1 where
    there are fewer, and weight float32 of the same shape: 0 for none, else 1 ("keys") or exp2(score - norm).
    """
    batch = first.shape[0]
    slots, rests = candidate_slots(budget, num_sink_tokens), rest_slots(kappa)
    neighbors, weights = [], []
    for layer in range(num_layers):
        place = layer_state(candidate, layer, (batch, num_places, slots), "candidate")
        score = layer_state(candidate_score, layer, (batch, num_lists, slots), "candidate_score")
        rest = layer_state(candidate_rest, layer, (batch, num_lists, rests), "candidate_rest")
        norm = layer_state(candidate_norm, layer, (batch, num_lists), "candidate_norm")
        entries = edge_entries(score, place.repeat_interleave(num_lists // num_places, 1))
        best = torch.cat([entries, rest], -1).topk(kappa, -1).values
        found = best > NO_ENTRY
        neighbors.append(torch.where(found, best & 0x7FFFFFFF, -1).int())
        if source == "keys":
            weights.append(found.float())
        else:
            bits = (best >> 32).int()
            value = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).view(torch.float32)
            weights.append(torch.where(found, torch.exp2(value - norm[..., None]), 0.0))
    return torch.stack(neighbors), torch.stack(weights)
