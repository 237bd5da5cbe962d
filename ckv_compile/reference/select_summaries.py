"""The best of the communities that a decode step does not retrieve."""

from __future__ import annotations

import torch
from torch import Tensor

from ckv_compile.reference.attended import Span, attended_spans
from ckv_compile.reference.nominal import capacities, layer_state
from ckv_compile.reference.retrieve import longest_fitting_run, mandatory_tokens, ranked_scores, rooms_for


def select_summaries(
    scores: Tensor,
    size: Tensor,
    num_communities: Tensor,
    n_indexed: Tensor,
    capacity: Tensor,
    length: Tensor,
    first: Tensor,
    tally: Tensor,
    layer: int,
    batch: int,
    num_graphs: int,
    budget: int,
    reserved: int,
    num_sink_tokens: int,
    recent_window: int,
) -> Tensor:
    """List the best communities below those that ``retrieve``, with the same arguments, takes (or takes tokens of).

    In order of score, of equals the larger id first; NaN, -inf and empty communities are left out. There are at most
    min(reserved, budget - sinks - tail) of them; none where the budget is the whole context, which then is attended as
    it is, or where nothing lies between sinks and tail. Members in the tail are not told apart: a community with some of
    them is listed like any other, and stands for them a second time.
    scores: flat float32 [B, G, C]. size: flat int32 [L, B, G, C]. num_communities: flat int32 [L, B, G]. n_indexed: flat
    int32 [L, B]. capacity: int32 [3]. length: int [1], of one new token per row. first: int [B].
    tally: flat int64 [L, 2], of which the first number of the layer grows by the communities that are listed.
    Returns ids int32 [B, G, reserved] in ascending order, -1 behind the last.
    """
    shape = (batch, num_graphs, capacities(capacity)[0])
    out = torch.full((batch, num_graphs, reserved), -1, dtype=torch.int32, device=scores.device)
    spans = attended_spans(n_indexed, int(length), first, layer, num_sink_tokens, recent_window)
    rooms, wanted = rooms_for(spans, budget, reserved), [_wanted(span, budget, reserved) for span in spans]
    ranked, sizes = ranked_scores(scores, size, num_communities, layer, shape)
    if ranked.shape[2] == 0 or not any(wanted):
        return out
    _, fits = longest_fitting_run(ranked, sizes, torch.tensor(rooms, device=scores.device)[:, None])
    retrieved = fits.sum(-1).tolist()
    # Reversed, equal scores come with the larger id first.
    descending, order = ranked.flip(-1).sort(dim=-1, descending=True, stable=True)
    present = (descending > -torch.inf).sum(-1).tolist()
    for row in range(batch):
        for graph in range(num_graphs):
            begin = retrieved[row][graph] or int(rooms[row] > 0)  # the best alone, even where it does not fit
            end = min(begin + wanted[row], present[row][graph])
            if end > begin:
                ids = ranked.shape[2] - 1 - order[row, graph, begin:end]
                out[row, graph, : end - begin] = ids.sort().values.to(torch.int32)
    layer_state(tally, layer, (2,), "tally")[0] += (out >= 0).sum().to(tally.device)
    return out


def _wanted(span: Span, budget: int, reserved: int) -> int:
    if span.tail_start == span.sink_end or budget >= span.stop - span.first:
        return 0
    return min(reserved, max(0, budget - mandatory_tokens(span)))
