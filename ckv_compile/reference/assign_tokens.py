"""Log a new token, give the oldest tokens that have none their community, in every layer, and update the index."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from typing import NamedTuple

from torch import Tensor

from ckv_compile.index_layout import ASSIGNED_AT_ONCE, waiting_entry
from ckv_compile.reference.encode_centroids import decode_centroids, encode_centroids
from ckv_compile.reference.nominal import accumulate_dtype, capacities, layer_state


class Assignment(NamedTuple):
    """What one token changes in one graph."""

    community: int
    is_new: bool
    community_increments: dict[int, float]
    total_increment: float


def assign_tokens(
    new_neighbor: Tensor,
    new_weight: Tensor,
    new_key: Tensor,
    centroid: Tensor,
    centroid_scale: Tensor,
    channel_scale: Tensor,
    log_mean: Tensor,
    mean_at: Tensor,
    start: Tensor,
    stored: Tensor,
    size: Tensor,
    num_communities: Tensor,
    n_indexed: Tensor,
    log_community: Tensor,
    log_first: Tensor,
    label: Tensor,
    community_weight: Tensor,
    total_weight: Tensor,
    edge_neighbor: Tensor,
    edge_weight: Tensor,
    gamma: Tensor,
    capacity: Tensor,
    length: Tensor,
    first: Tensor,
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    num_lists: int,
    kappa: int,
    num_graphs: int,
    num_sink_tokens: int,
    lam: float,
    new_value: Tensor | None = None,
    mean_value: Tensor | None = None,
    log_value: Tensor | None = None,
) -> None:
    """``assign_token`` in every layer, with the edges of ``pick_edges``.

    new_neighbor int32, new_weight float32: [L, B, num_lists, kappa]. Flat state that is read: new_key
    [L, B, num_kv_heads, head_dim] (key dtype), and new_value like it where mean_value and log_value are given.
    capacity: that of any layer. The rest is as ``assign_token`` has it.
    """
    batch = first.shape[0]
    lists = (batch, num_lists, kappa)
    state = (
        centroid, centroid_scale, channel_scale, log_mean, mean_at, start, stored, size, num_communities,
        n_indexed, log_community, log_first, label, community_weight, total_weight, edge_neighbor, edge_weight, gamma,
    )  # fmt: skip
    for layer in range(num_layers):
        assign_token(
            layer_state(new_neighbor, layer, lists, "new_neighbor"),
            layer_state(new_weight, layer, lists, "new_weight"),
            layer_state(new_key, layer, (batch, num_kv_heads, head_dim), "new_key"),
            *state, capacity, length, first, layer, num_graphs, num_sink_tokens, lam,
            None if new_value is None else layer_state(new_value, layer, (batch, num_kv_heads, head_dim), "new_value"),
            mean_value, log_value,
        )  # fmt: skip


def assign_token(
    neighbor: Tensor,
    weight: Tensor,
    key_new: Tensor,
    centroid: Tensor,
    centroid_scale: Tensor,
    channel_scale: Tensor,
    log_mean: Tensor,
    mean_at: Tensor,
    start: Tensor,
    stored: Tensor,
    size: Tensor,
    num_communities: Tensor,
    n_indexed: Tensor,
    log_community: Tensor,
    log_first: Tensor,
    label: Tensor,
    community_weight: Tensor,
    total_weight: Tensor,
    edge_neighbor: Tensor,
    edge_weight: Tensor,
    gamma: Tensor,
    capacity: Tensor,
    length: Tensor,
    first: Tensor,
    layer: int,
    num_graphs: int,
    num_sink_tokens: int,
    lam: float,
    new_value: Tensor | None = None,
    mean_value: Tensor | None = None,
    log_value: Tensor | None = None,
) -> None:
    """Log the token at ``length``, assign the oldest that wait (CommunityKV, eq. 6 and 7), and advance ``n_indexed``.

    neighbor int32, weight float32: [B, H, kappa] lists of ``approximate_edges`` (H = Hq) or ``key_edges`` (H = G);
    graph g adds up the edges of its H // G lists. A list is a set: negative, repeated and unlabelled positions and
    weights that are not positive and finite are skipped. key_new: [B, Hkv, D].
    State is flat and int32 unless said otherwise; all but log_first, channel_scale, gamma and capacity is mutated:
    centroid int8 [L, B, G, C, D] and centroid_scale float32 [L, B, G, C] (see ``encode_centroids``; channel_scale
    float32 [L, B, G, D] is read), log_mean [L, B, G, E, D] (key dtype), mean_at, start, stored, size [L, B, G, C];
    num_communities [L, B, G]; n_indexed and log_first [L, B]; log_community [L, B, G, E]; label [L, B, G, N];
    community_weight [L, B, G, C], total_weight and gamma [L, B, G] (float32); edge_neighbor and edge_weight (float32)
    [L, B, H, E, kappa]; mean_value [L, B, G, C, D] where it is kept, for the values, of which new_value [B, Hkv, D] are
    what key_new is of the keys, and log_value [L, B, G, E, D] what log_mean is.

    The new token is logged wherever slot length - log_first exists: its edges, for the next partition too, its own key
    and value in log_mean and log_value, and ``waiting_entry`` in log_community, which says that all this is there. Then
    up to ASSIGNED_AT_ONCE tokens are assigned, one after the other: each time that at ``n_indexed``, which is the new one
    unless some arrived while a partition was made. A row changes only if that token waits in the log, is no sink, the
    labels have room, and every graph that needs a new community has room for one. Otherwise it stays in the tail.
    As in the graph of the prefill, a token's tie with itself is left out (eq. 3 has it), a deviation.

    Mean keys are kept only of communities that have gained members since they were published, which are no more than
    the log has entries. log_mean[e] is the mean of the community that the token of entry e joined, with that token;
    mean_at is the newest such entry of a community and counts only where size > stored. Where nobody has joined, the
    old mean is what the centroid decodes to: an entry is half a step, centroid_scale * channel_scale, off at most. This
    happens once between two publications and weighs as much as the stored members do, so it shrinks with every
    member that joins and never adds up.
    """
    position = int(length)
    batch, lists, kappa = neighbor.shape
    max_communities, max_tokens, max_log = capacities(capacity)
    rows = (batch,)
    graphs = (batch, num_graphs)
    communities = (*graphs, max_communities)
    indexed = layer_state(n_indexed, layer, rows, "n_indexed")
    starts = layer_state(log_first, layer, rows, "log_first").tolist()
    nodes = [begin + num_sink_tokens for begin in first.tolist()]  # first position of a row that is in the graph
    kept_neighbor = layer_state(edge_neighbor, layer, (batch, lists, max_log, kappa), "edge_neighbor")
    kept_weight = layer_state(edge_weight, layer, (batch, lists, max_log, kappa), "edge_weight")
    log = layer_state(log_community, layer, (*graphs, max_log), "log_community")
    keys = _of_graphs(key_new, num_graphs)
    means = layer_state(log_mean, layer, (*graphs, max_log, keys.shape[2]), "log_mean")
    values = logged_values = mean_values = None
    if new_value is not None and mean_value is not None and log_value is not None:
        values = _of_graphs(new_value, num_graphs)
        mean_values = layer_state(mean_value, layer, (*communities, values.shape[2]), "mean_value")
        logged_values = layer_state(log_value, layer, (*graphs, max_log, values.shape[2]), "log_value")
    for row in range(batch):
        slot = position - starts[row]
        if 0 <= slot < max_log:
            kept_neighbor[row, :, slot] = neighbor[row].to(kept_neighbor.dtype)
            kept_weight[row, :, slot] = weight[row]
            log[row, :, slot] = waiting_entry(position)
            means[row, :, slot] = keys[row]
            if values is not None and logged_values is not None:
                logged_values[row, :, slot] = values[row]

    labels = layer_state(label, layer, (*graphs, max_tokens), "label")
    number = layer_state(num_communities, layer, graphs, "num_communities")
    weights = layer_state(community_weight, layer, communities, "community_weight")
    totals = layer_state(total_weight, layer, graphs, "total_weight")
    gammas = layer_state(gamma, layer, graphs, "gamma").tolist()
    sizes = layer_state(size, layer, communities, "size")
    starts_of = layer_state(start, layer, communities, "start")
    stored_of = layer_state(stored, layer, communities, "stored")
    newest = layer_state(mean_at, layer, communities, "mean_at")
    codes = layer_state(centroid, layer, (*communities, keys.shape[2]), "centroid")
    scales = layer_state(centroid_scale, layer, communities, "centroid_scale")
    channels = layer_state(channel_scale, layer, (*graphs, keys.shape[2]), "channel_scale")

    for _, row in itertools.product(range(ASSIGNED_AT_ONCE), range(batch)):
        token = int(indexed[row])
        slot = token - starts[row]
        if not (nodes[row] <= token <= position and token < max_tokens and 0 <= slot < max_log):
            continue
        if int(log[row, 0, slot]) != waiting_entry(token):
            continue
        plans = []
        for graph in range(num_graphs):
            listed, label_of, weight_of = [], {token: -1}, {}
            for head in range(graph * lists // num_graphs, (graph + 1) * lists // num_graphs):
                entries: dict[int, float] = {}
                edges = kept_neighbor[row, head, slot].tolist(), kept_weight[row, head, slot].tolist()
                for j, alpha in zip(*edges, strict=True):
                    community = int(labels[row, graph, j]) if nodes[row] <= j < token else -1
                    is_node = 0 <= community < max_communities
                    if (is_node or j == token) and alpha > 0 and math.isfinite(alpha) and j not in entries:
                        entries[j] = alpha
                        if is_node:
                            label_of[j], weight_of[community] = community, float(weights[row, graph, community])
                listed.append(entries)
            before = float(totals[row, graph]), gammas[row][graph], int(number[row, graph])
            plans.append(_choose(token, listed, label_of, weight_of, *before, lam))
        if any(plan.community >= max_communities for plan in plans):
            continue
        for graph, plan in enumerate(plans):
            chosen = plan.community
            at = (row, graph, chosen)
            if plan.is_new:
                number[row, graph] += 1
                starts_of[at] = 0
                stored_of[at] = 0
                sizes[at] = 0
                weights[at] = 0
                if mean_values is not None:
                    mean_values[at] = 0
            own = means[row, graph, slot].clone()
            if sizes[at] == 0:
                old = own
            elif sizes[at] > stored_of[at]:
                old = means[row, graph, int(newest[at])]
            else:
                old = decode_centroids(codes[at][None], scales[at][None], channels[row, graph])[0]
            sizes[at] += 1
            mean = _moved(old, own, sizes[at])
            means[row, graph, slot], newest[at] = mean, slot
            if mean_values is not None and logged_values is not None:
                mean_values[at] = _moved(mean_values[at], logged_values[row, graph, slot], sizes[at])
            code, scale = encode_centroids(mean[None], channels[row, graph])
            codes[at], scales[at] = code[0], scale[0]
            for community, increment in plan.community_increments.items():
                weights[row, graph, community] += increment
            totals[row, graph] += plan.total_increment
            labels[row, graph, token] = chosen
            log[row, graph, slot] = chosen
        indexed[row] += 1


def _of_graphs(new: Tensor, num_graphs: int) -> Tensor:
    """A new token's keys or values [B, Hkv, D] by graph; one graph over several heads holds theirs side by side."""
    return new.flatten(1)[:, None] if num_graphs == 1 else new.repeat_interleave(num_graphs // new.shape[1], 1)


def _moved(mean: Tensor, new: Tensor, count: Tensor) -> Tensor:
    """The mean of ``count`` vectors, the last of which is ``new``; ``mean`` is that of the others, if there are any."""
    wide = mean.to(accumulate_dtype(new.dtype))
    return (wide + (new.to(wide.dtype) - wide) / count).to(new.dtype)


def _choose(
    token: int,
    listed: list[dict[int, float]],
    label_of: dict[int, int],
    weight_of: dict[int, float],
    total: float,
    gamma: float,
    num_communities: int,
    lam: float,
) -> Assignment:
    """The community of largest modularity gain (eq. 7), after adding the token's edges (eq. 2-4 with eq. 6).

    listed: per list, the weight of each neighbour. label_of: community of each neighbour but the token itself.
    weight_of: w_C of the neighbours' communities before this token; total: 2m before it.
    """
    degree: dict[int, float] = defaultdict(float)  # increments of w_j
    tie: dict[int, float] = defaultdict(float)  # w_ij of the new token i
    for entries in listed:
        everything = sum(entries.values())
        for j, alpha in entries.items():
            degree[j] += (1 - lam) * alpha * (everything - alpha)  # co-attention with every other listed token
            if j != token:
                degree[j] += lam / 2 * alpha
                degree[token] += lam / 2 * alpha
                tie[j] += lam / 2 * alpha + (1 - lam) * alpha * entries.get(token, 0.0)
    increments: dict[int, float] = defaultdict(float)
    ties: dict[int, float] = defaultdict(float)
    for j, amount in degree.items():
        if j != token:
            increments[label_of[j]] += amount
            ties[label_of[j]] += tie[j]
    total_increment = sum(degree.values())
    best, best_gain = num_communities, 0.0  # a community of its own gains nothing
    for community in sorted(ties):
        chance = degree[token] * (weight_of[community] + increments[community])
        gain = ties[community] - (gamma * chance / (total + total_increment) if chance else 0.0)
        if gain > best_gain:
            best, best_gain = community, gain
    increments[best] += degree[token]
    return Assignment(best, best == num_communities, dict(increments), total_increment)
