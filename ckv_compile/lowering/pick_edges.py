"""``ckv::pick_edges`` on CUDA: one program per edge list of a layer, all layers at once."""

from __future__ import annotations

from typing import Any

import torch

from ckv_compile.index_layout import candidate_slots, rest_slots
from ckv_compile.lowering.edges import kept_constants
from ckv_compile.lowering.template_call import Config, Template, empty, fixed, lowers, static_size

template = Template("pick_edges", lambda meta: (meta["BATCH"] * meta["LISTS"], meta["LAYERS"], 1), "edge_entries")


def configs() -> list[Config]:
    """Blocks of which a usual budget has a few, so that most programs sort once."""
    return [{"BLOCK": 2048, "num_warps": 8, "num_stages": 1}]


@lowers(torch.ops.ckv.pick_edges.default)
def pick_edges(
    candidate: Any, candidate_score: Any, candidate_rest: Any, candidate_norm: Any, first: Any,
    num_layers: int, num_places: int, num_lists: int, budget: int, num_sink_tokens: int, kappa: int, source: str,
) -> Any:  # fmt: skip
    device = candidate.get_device()
    (batch,) = static_size(first)
    constants = constants_of(num_layers, batch, num_places, num_lists, budget, num_sink_tokens, kappa, source == "keys")
    norm = [] if source == "keys" else fixed(candidate_norm)
    size = [num_layers, batch, num_lists, kappa]
    weight = empty(size, torch.float32, device)
    inputs = [*fixed(candidate, candidate_score, candidate_rest), weight, *norm]
    return [template(inputs, (size, torch.int32), [weight], constants, configs()), weight]


def constants_of(
    layers: int, batch: int, places: int, lists: int, budget: int, sinks: int, kappa: int, keys: bool
) -> dict[str, Any]:
    return {
        "LAYERS": layers, "BATCH": batch, "PLACES": places, "LISTS": lists, "KAPPA": kappa,
        "SLOTS": candidate_slots(budget, sinks), "RESTS": rest_slots(kappa), **kept_constants(keys, kappa),
    }  # fmt: skip
