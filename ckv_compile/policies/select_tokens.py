"""The list of a decode step whose policy scores every token."""

from __future__ import annotations

import torch
from torch import Tensor

from ckv_compile.policies import policy_of
from ckv_compile.policies.base import PAGE, Step, TokenPolicy
from ckv_compile.reference.attended import attended_spans, equal_spans
from ckv_compile.reference.nominal import accumulate_dtype, cache_prefix, capacities, layer_state
from ckv_compile.reference.retrieve import mandatory_tokens, rooms_for


def select_tokens(
    query: Tensor,
    key: Tensor,
    n_indexed: Tensor,
    capacity: Tensor,
    length: Tensor,
    first: Tensor,
    tally: Tensor,
    importance: Tensor | None,
    neighbor: Tensor | None,
    page_low: Tensor | None,
    page_high: Tensor | None,
    last_query: Tensor | None,
    policy: str,
    layer: int,
    scale: float,
    num_graphs: int,
    budget: int,
    num_sink_tokens: int,
    recent_window: int,
    neighbors: int,
) -> tuple[Tensor, Tensor]:
    """List the tokens that the queries from position ``length`` on attend to besides sinks and tail (see ``attended``).

    room = budget - sinks - tail tokens. Of the positions between sinks and tail, all where they fit into the room or the
    budget is the whole context, else the ``room`` that the policy scores best, of equal ones the newer.
    query: [B, Hq, Q, D]; key: nominal view [B, Hkv, NOM, D] that holds the queries' own tokens. n_indexed: flat int32
    [L, B]. capacity: int32 [>= 3]. length: int [1]. first: int [B]. tally: flat int64 [L, 2], as for ``retrieve``.
    State that the policy names, flat over layers, others None: importance float32 [L, B, G, N], neighbor int32
    [L, B, G, N, neighbors], page_low and page_high [L, B, Hkv, ceil(N / 16), D], last_query float32 [L, B, Hq, D], updated.
    Returns tokens int32 [B, G, budget], of which the first count (int32 [B, G]) are meant, in ascending order.
    """
    batch, num_query_heads, queries, dim = query.shape
    position = int(length)
    spans = attended_spans(n_indexed, position, first, layer, num_sink_tokens, recent_window, queries)
    capacity_tokens = capacities(capacity)[1]
    per_graph = batch, num_graphs, capacity_tokens
    pages = batch, key.shape[1], -(-capacity_tokens // PAGE), dim
    state = {
        name: layer_state(nominal, layer, shape, name)
        for name, nominal, shape in (
            ("importance", importance, per_graph),
            ("neighbor", neighbor, (*per_graph, neighbors)),
            ("page_low", page_low, pages),
            ("page_high", page_high, pages),
            ("last_query", last_query, (batch, num_query_heads, dim)),
        )
        if nominal is not None
    }
    chooses = policy_of(policy)
    assert isinstance(chooses, TokenPolicy)
    keys = cache_prefix(key, position + queries, "key")
    tokens = torch.full((batch, num_graphs, budget), -1, dtype=torch.int32, device=query.device)
    count = torch.zeros((batch, num_graphs), dtype=torch.int32, device=query.device)
    attended = 0
    for rows, span in equal_spans(spans):
        (room,) = rooms_for([span], budget, 0)
        chosen = torch.arange(span.sink_end, span.tail_start, device=query.device)
        if len(chosen) > room > 0:
            step = Step(
                query[rows].to(accumulate_dtype(query.dtype)), keys[rows], span, num_graphs, scale,
                {name: buffer[rows] for name, buffer in state.items()},
            )  # fmt: skip
            chosen = best(chooses.scores(step), room) + span.sink_end
        listed = chosen.shape[-1] if room > 0 else 0
        tokens[rows, :, :listed] = chosen[..., :listed].to(torch.int32)
        count[rows] = listed
        number = batch if rows == slice(None) else 1
        attended += number * num_graphs * (listed + mandatory_tokens(span))
    context = sum(span.stop - span.first for span in spans) * num_graphs
    layer_state(tally, layer, (2,), "tally").add_(torch.tensor([attended, context], device=tally.device))
    return tokens, count


def best(scores: Tensor, room: int) -> Tensor:
    """Places of the ``room`` largest of scores [.., n], of equals the later, NaN last: int64 [.., room], ascending.

    Scores are float32, or int64 that differ from one another.
    """
    if scores.dtype != torch.int64:
        scores = scores.float().nan_to_num(-torch.inf, torch.inf, -torch.inf)
        bits = (scores + 0.0).view(torch.int32).long()  # + 0.0 turns -0.0 into 0.0
        # An integer that orders like (score, place).
        scores = torch.where(bits >= 0, bits, -(bits & 0x7FFFFFFF)) * (1 << 31)
        scores = scores + torch.arange(scores.shape[-1], device=scores.device)
    return scores.topk(room, -1).indices.sort(-1).values
