"""The tokens of the best-scoring whole communities that fit the budget."""

from __future__ import annotations

import torch
from torch import Tensor

from ckv_compile.reference.attended import Span, attended_spans
from ckv_compile.reference.nominal import capacities, layer_state

NO_TOKEN = torch.iinfo(torch.int32).max  # sorts behind every position


def retrieve(
    shortlist: Tensor,
    left_out: Tensor,
    scores: Tensor,
    start: Tensor,
    stored: Tensor,
    size: Tensor,
    member: Tensor,
    log_community: Tensor,
    log_first: Tensor,
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
    num_sink_tokens: int,
    recent_window: int,
    has_log: bool,
    num_new: int = 1,
    reserved: int = 0,
) -> tuple[Tensor, Tensor]:
    """List the tokens that the ``num_new`` queries from position ``length`` on attend to besides sinks and tail.

    See ``attended``: one list serves the queries of a row, and the budget is that of the last one.

    room = budget - reserved - sinks - tail tokens, or everything where the budget is the whole context.
    In order of score (of equals the larger id first, NaN excluded), the longest run of communities
    whose total size is at most room is taken whole. If even the best does not fit, its newest room tokens are.
    Members that are sinks or in the tail count and may be listed; readers of the list skip them. With room <= 0
    nothing is listed. reserved is the part of the budget that ``select_summaries`` fills.
    shortlist and left_out (see ``route``) only save work: the result is that of all scores.
    scores: flat float32 [B, G, C]; -inf excludes a community, and so does a size of 0.
    start, stored, size: flat int32 [L, B, G, C]; community c holds member[start : start + stored] of the flat
    int32 [L, B, G, N] and the log entries e with log_community[e] == c (flat [L, B, G, E]), which stand for position
    log_first + e (flat [L, B]); the log holds n_indexed - log_first entries, if has_log. num_communities: flat int32
    [L, B, G].
    tally: flat int64 [L, 2], to which the tokens that the budget was charged for (listed, sinks and tail; at most the
    context) and the tokens in context are added, per row and graph, however many queries the row has.
    Returns tokens int32 [B, G, budget], of which the first count (int32 [B, G]) are meant, in a repeatable order.
    """
    device = scores.device
    position = int(length)
    max_communities, max_tokens, max_log = capacities(capacity)
    shape = (batch, num_graphs, max_communities)
    tokens = torch.full((batch, num_graphs, budget), -1, dtype=torch.int32, device=device)
    count = torch.zeros((batch, num_graphs), dtype=torch.int32, device=device)

    spans = attended_spans(n_indexed, position, first, layer, num_sink_tokens, recent_window, num_new)
    mandatory = [mandatory_tokens(span) for span in spans]
    rooms = rooms_for(spans, budget, reserved)
    ranked, sizes = ranked_scores(scores, size, num_communities, layer, shape)
    if ranked.shape[2] > 0 and max(rooms) > 0:
        room = torch.tensor(rooms, device=device)[:, None]  # [B, 1]
        ids, taken = longest_fitting_run(ranked, sizes, room)
        lists = (
            layer_state(start, layer, shape, "start"),
            layer_state(stored, layer, shape, "stored"),
            layer_state(member, layer, (batch, num_graphs, max_tokens), "member"),
        )
        log_starts = layer_state(log_first, layer, (batch,), "log_first").tolist()
        indexed = layer_state(n_indexed, layer, (batch,), "n_indexed").tolist()
        logged = [
            min(max(0, end - begin), max_log) if has_log else 0 for begin, end in zip(log_starts, indexed, strict=True)
        ]
        log = layer_state(log_community, layer, (batch, num_graphs, max_log), "log_community")[..., : max(logged)]
        entries = torch.arange(log.shape[2], device=device)
        log_tokens = entries + torch.tensor(log_starts, device=device)[:, None, None]  # [B, 1, e]
        in_log = entries < torch.tensor(logged, device=device)[:, None, None]

        best_score = ranked.gather(2, ids[..., :1])[..., 0]
        too_big = ((~taken[..., 0]) & (best_score > -torch.inf) & (room > 0)).nonzero().tolist()
        found = _expand(ids, taken, *lists, budget, least=budget if too_big else 0)  # [B, G, up to budget]
        if log.shape[2]:
            chosen = torch.zeros(shape, dtype=torch.bool, device=device)
            chosen.scatter_(2, ids, taken)
            hit = in_log & chosen.gather(2, log.long().clamp(0, max_communities - 1)) & (log >= 0)
            found = torch.cat([found, torch.where(hit, log_tokens, NO_TOKEN)], -1)
        # Where even the best community does not fit: its newest tokens.
        for row, graph in too_big:
            best = int(ids[row, graph, 0])
            begin, held = int(lists[0][row, graph, best]), int(lists[1][row, graph, best])
            own = [lists[2][row, graph, begin : begin + held].long()]
            if log.shape[2]:
                own.append(log_tokens[row, 0][in_log[row, 0] & (log[row, graph] == best)])
            newest = torch.cat(own).sort(descending=True).values[: rooms[row]]
            found[row, graph] = NO_TOKEN
            found[row, graph, : len(newest)] = newest
        found = found.to(torch.int32).sort(-1).values[..., :budget]
        present = found < NO_TOKEN
        count.copy_(present.sum(-1))
        tokens[..., : found.shape[2]] = torch.where(present, found, -1)

    context = sum(span.stop - span.first for span in spans) * num_graphs
    charged = count.cpu() + torch.tensor(mandatory, dtype=torch.int32)[:, None]
    contexts = torch.tensor([span.stop - span.first for span in spans], dtype=torch.int32)[:, None]
    attended = int(torch.minimum(charged, contexts).sum())
    layer_state(tally, layer, (2,), "tally").add_(torch.tensor([attended, context], device=tally.device))
    return tokens, count


def mandatory_tokens(span: Span) -> int:
    """Sinks and tail of a row."""
    return span.sink_end - span.first + span.stop - span.tail_start


def rooms_for(spans: list[Span], budget: int, reserved: int) -> list[int]:
    """Tokens that each row may retrieve. A budget of the whole context takes everything, whatever sizes count twice."""
    rooms = []
    for span in spans:
        context = span.stop - span.first
        room = context if budget >= context else budget - reserved - mandatory_tokens(span)
        rooms.append(room if span.tail_start > span.sink_end else 0)
    return rooms


def ranked_scores(
    scores: Tensor, size: Tensor, num_communities: Tensor, layer: int, shape: tuple[int, int, int]
) -> tuple[Tensor, Tensor]:
    """Scores without NaN, -inf for what is no community, and sizes of a layer; flat state of ``shape`` [B, G, C].

    Both are [B, G, n] with the largest number of communities n of any graph.
    """
    number = layer_state(num_communities, layer, shape[:2], "num_communities")
    used = min(int(number.amax()), shape[2]) if number.numel() else 0
    sizes = layer_state(size, layer, shape, "size")[..., :used]
    ranked = layer_state(scores, 0, shape, "scores")[..., :used]
    excluded = (torch.arange(used, device=scores.device) >= number[..., None]) | (sizes <= 0)
    return torch.where(excluded, -torch.inf, ranked.nan_to_num(-torch.inf, torch.inf, -torch.inf)), sizes


def longest_fitting_run(scores: Tensor, sizes: Tensor, room: Tensor) -> tuple[Tensor, Tensor]:
    """Communities in order of score, and which of them fit.

    scores float32 [B, G, n] without NaN, sizes int [B, G, n], room [B, 1].
    Returns ids int64 [B, G, k], best first (of equals the larger), and a mask [B, G, k]: a run of leading entries.
    """
    total = scores.shape[-1]
    # A signed integer that orders like (score, id), so that every key is distinct.
    bits = (scores + 0.0).view(torch.int32).long()  # + 0.0 turns -0.0 into 0.0
    order = torch.where(bits >= 0, bits, -(bits & 0x7FFFFFFF)) * (1 << 31)
    order = order + torch.arange(total, device=scores.device)
    most = max(1, int(room.max()))
    k = min(total, most, 256)
    while True:
        ids = torch.topk(order, k, dim=-1).indices
        picked = sizes.gather(-1, ids).long()
        end = picked.cumsum(-1)
        fits = (end <= room[..., None]) & (scores.gather(-1, ids) > -torch.inf)
        # Sizes are at least 1 where the score is finite, so `most` communities always decide.
        if k >= min(total, most) or not bool(fits[..., -1].any()):
            return ids, fits
        k = min(total, most, 4 * k)


def _expand(
    ids: Tensor, taken: Tensor, start: Tensor, stored: Tensor, member: Tensor, budget: int, least: int
) -> Tensor:
    """Members of the taken communities [B, G, k]: int64 [B, G, least to budget slots], NO_TOKEN in unused ones."""
    held = torch.where(taken, stored.gather(2, ids), 0).long()
    end = held.cumsum(-1)
    longest = min(budget, max(least, int(end[..., -1].max())))
    slot = torch.arange(longest, device=ids.device).expand(*ids.shape[:2], longest).contiguous()
    which = torch.searchsorted(end, slot, right=True).clamp_(max=ids.shape[2] - 1)
    shift = start.gather(2, ids).long() - end + held
    source = (slot + shift.gather(2, which)).clamp_(0, member.shape[2] - 1)
    return torch.where(slot < end[..., -1:], member.gather(2, source).long(), NO_TOKEN)
