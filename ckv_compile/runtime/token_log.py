"""The log of generated tokens begins anew behind a publication, with those that have come since.

A decode step logs its token (``ckv::assign_tokens``). A partition covers the tokens that there were when it was begun;
its publication moves what is known of later ones to the front of the log, where they wait: the next steps assign them,
two at a time. All of it is copies on the device, in a few launches for all layers that are published together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from ckv_compile.index_layout import waiting_entry

if TYPE_CHECKING:
    from ckv_compile.runtime.index import CommunityIndex


@dataclasses.dataclass(frozen=True)
class Behind:
    """What a layer's log begins anew with: tokens ``stop .. length - 1``, logged at ``base`` and after it.

    key, value: the cache's of the layer ``[B, Hkv, >= length, D]``; value where the index keeps mean values.
    """

    base: int
    stop: int
    length: int
    key: torch.Tensor
    value: torch.Tensor | None

    @property
    def span(self) -> tuple[int, int, int]:
        return self.base, self.stop, self.length


def begin_behind(index: CommunityIndex, behind: dict[int, Behind]) -> None:
    """Begin the log of these layers at ``stop`` of each. Tokens that no step logged do not wait: they stay in the tail."""
    for layers in _runs(behind):
        _begin(index, slice(layers[0], layers[-1] + 1), [behind[layer] for layer in layers])


def _runs(behind: dict[int, Behind]) -> Iterator[list[int]]:
    """Neighbouring layers of equal spans."""
    run: list[int] = []
    for layer in sorted(behind):
        if run and (layer != run[-1] + 1 or behind[layer].span != behind[run[-1]].span):
            yield run
            run = []
        run.append(layer)
    if run:
        yield run


def _begin(index: CommunityIndex, layers: slice, behind: list[Behind]) -> None:
    base, stop, length = behind[0].span
    begin = max(base, stop)  # the first token of the log that is still wanted
    source, target = begin - base, begin - stop
    room = index.shape.log
    count = max(0, min(length - begin, room - source, room - target))
    entries = index.log_community[layers]
    index.log_first[layers].fill_(stop)
    index.log_starts[layers] = [stop] * len(behind)
    if not count:
        entries.fill_(-1)
        return
    old = entries[..., source : source + count].clone()
    waiting = torch.arange(begin, begin + count, dtype=torch.int32, device=index.device)
    waiting = waiting_entry(waiting)
    entries.fill_(-1)
    entries[..., target : target + count].copy_(torch.where((old >= 0) | (old == waiting), waiting, -1))
    for name in ("edge_neighbor", "edge_weight"):
        lists = index.buffers[name][layers]
        if source != target:
            lists[..., target : target + count, :].copy_(lists[..., source : source + count, :].clone())
    where = slice(target, target + count)
    index.log_mean[layers][..., where, :].copy_(_own(index, [one.key for one in behind], begin, count))
    if "log_value" in index.buffers:
        values = [one.value for one in behind if one.value is not None]
        assert len(values) == len(behind), "an index that keeps mean values needs the values"
        index.log_value[layers][..., where, :].copy_(_own(index, values, begin, count))


def _own(index: CommunityIndex, caches: list[torch.Tensor], begin: int, count: int) -> torch.Tensor:
    """Rows ``begin ...`` of caches [B, Hkv, n, D] by layer and graph: [layers, B, G, count, D]."""
    own = torch.stack([cache[:, :, begin : begin + count] for cache in caches])
    graphs = index.shape.graphs
    if graphs == 1:  # one graph over several heads holds theirs side by side
        return own.transpose(2, 3).flatten(3)[:, :, None]
    return own.repeat_interleave(graphs // own.shape[2], 2) if graphs != own.shape[2] else own


def invalidate(index: CommunityIndex, layer: int, length: int) -> None:
    """Positions from ``length`` on are gone: what the log has of them is of no token."""
    index.log_community[layer, :, :, max(0, length - index.log_starts[layer]) :].fill_(-1)
