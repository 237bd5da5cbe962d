"""Score groups of communities, and list those whose communities are worth a score of their own."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ckv_compile.index_layout import DEVIATIONS, GROUP, MOST_COVERAGE, coarse_parts
from ckv_compile.reference.nominal import accumulate_dtype, capacities, layer_state

LARGEST = 3e38  # of a score, so that bounds and halves are finite


def route_coarse(
    query: Tensor,
    coarse: Tensor,
    coarse_scale: Tensor,
    channel_scale: Tensor,
    num_grouped: Tensor,
    num_communities: Tensor,
    capacity: Tensor,
    coarse_scores: Tensor,
    scores: Tensor,
    layer: int,
    num_graphs: int,
    num_kv_heads: int,
    scale: float,
    least: int,
    start: int,
    slots: int,
    parts: int | None = None,
) -> tuple[Tensor, Tensor]:
    """List the groups of ``GROUP`` consecutive communities that ``route`` should score, for every row and graph.

    query: [B, Hq, Q, D], heads and centroids as for ``route``. coarse flat int8 [L, B, G, K, 2, D] and coarse_scale flat
    float32 [L, B, G, K, 2] hold mean and spread of each group (see ``coarse_centroids``), K = ceil(C / GROUP).
    num_grouped: flat int32 [L, B, G], the communities that these were made of; num_communities as for ``route``.

    Up to ``start`` communities, and where no groups are kept (num_grouped 0), nothing is listed or written. Else the
    score of a group is what its best may reach, were it normally distributed, for w = q * channel_scale * scale:

        max over heads and queries of  w . mean + DEVIATIONS * sqrt(sum over channels of w^2 spread^2),

    -inf where it has no member, and the largest number where it is not known (NaN) or the group has communities from
    num_grouped on, of which there are f groups. Of the groups k of each part (k % parts), the

        ceil(max(least, ceil(sqrt(groups * least) / 2)) / parts) + ceil(f / parts),  at most slots / parts,

    best are listed, of equal ones the larger: so that the work of a step grows like the square root of the context.
    coarse_scores: flat float32 [B, G, K], written. scores: flat float32 [B, G, C], of which -inf is written to all
    communities of those rows and graphs, so that what is not scored counts as excluded.
    Returns visit int32 [B, G, slots] and count int32 [B, G]: the first count entries of visit are groups, or -1 where a
    part has fewer; a count of -1 stands for all communities. parts: ``coarse_parts(least)`` when None.
    """
    parts = coarse_parts(least) if parts is None else parts
    batch, _, _, dim = query.shape
    room = capacities(capacity)[0]
    shape, groups_room = (batch, num_graphs), -(-room // GROUP)
    kinds = num_kv_heads if num_graphs == 1 else 1
    number = layer_state(num_communities, layer, shape, "num_communities").clamp(max=room)
    grouped = layer_state(num_grouped, layer, shape, "num_grouped")
    visit = torch.full((*shape, slots), -1, dtype=torch.int32, device=query.device)
    count = torch.full(shape, -1, dtype=torch.int32, device=query.device)
    wide = accumulate_dtype(query.dtype)
    for row, graph in ((number > start) & (grouped > 0)).nonzero().tolist():
        total, known = int(number[row, graph]), int(grouped[row, graph])
        groups = -(-total // GROUP)
        at = (row, graph)
        code = layer_state(coarse, layer, (*shape, groups_room, 2, kinds, dim), "coarse")[at][:groups].to(wide)
        steps = layer_state(coarse_scale, layer, (*shape, groups_room, 2), "coarse_scale")[at][:groups].to(wide)
        channels = layer_state(channel_scale, layer, (*shape, kinds, dim), "channel_scale")[at].to(wide)
        weight = query.to(wide).reshape(*shape, kinds, -1, dim)[at] * channels[:, None] * scale  # [kinds, heads * Q, D]
        mean = torch.einsum("khd,nkd->nkh", weight, code[:, 0]) * steps[:, 0, None, None]
        spread = torch.einsum("khd,nkd->nkh", weight.square(), code[:, 1].square()).sqrt() * steps[:, 1, None, None]
        score = (mean + DEVIATIONS * spread).flatten(1).amax(1)
        score = torch.where(score == score, score, LARGEST).clamp(max=LARGEST)
        score = torch.where(steps[:, 1] < 0, -torch.inf, score)
        fresh = groups - known // GROUP if total > known else 0
        score[groups - fresh :] = LARGEST
        layer_state(coarse_scores, 0, (*shape, groups_room), "coarse_scores")[at][:groups] = score
        layer_state(scores, 0, (*shape, room), "scores")[at][:total] = -torch.inf
        quota = min(part_quota(groups, fresh, least, parts), slots // parts)
        for part in range(min(parts, groups)):
            own = torch.arange(part, groups, parts, device=query.device).flip(0)
            best = own[score[own].sort(descending=True, stable=True).indices[:quota]]
            visit[row, graph, part * quota : part * quota + len(best)] = best.int()
        count[row, graph] = parts * quota
    return visit, count


def part_quota(groups: int, fresh: int, least: int, parts: int) -> int:
    """Groups that each part lists, of so many groups of which ``fresh`` are listed in any case."""
    grown = int(np.ceil(np.sqrt(np.float32(groups) * np.float32(least)) * np.float32(0.5)))
    wanted = min(max(least, grown), MOST_COVERAGE * least)
    return -(-wanted // parts) + -(-fresh // parts)
