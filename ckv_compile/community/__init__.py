"""Communities of tokens on the host: graphs, their partition, new tokens, and the threads that do the work.

Arrays in, arrays out: numpy and numba, no torch. Names resolve on first use, because numba takes a while to import.
A compiled function calls compiled functions of its own file only: numba's cache on disk notices no edit of another.
"""

from __future__ import annotations

import importlib
from typing import Any

_MODULE_OF = {
    "TokenGraph": "graph", "attention_graph": "graph", "key_graph": "graph", "mixed_graph": "graph",
    "extended_graph": "graph", "ExtendedGraph": "graph",
    "seeded": "leiden", "modularity": "leiden", "is_connected": "leiden", "enforce_size": "leiden",
    "partition_graph": "engines",
    "ResolutionMemory": "resolution", "SearchPlan": "resolution",
    "Partition": "partition", "community_room": "partition", "contiguous_pages": "partition",
    "pages_block": "partition", "warm_up": "partition",
    "partition_keys_block": "partition", "partition_attention": "partition", "partition_mixed": "partition",
    "partition_built": "partition", "partition_refreshed": "partition", "partition_repaired": "partition",
    "PartitionPool": "workers", "shared_pool": "workers",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_MODULE_OF[name]}")
    value = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULE_OF])
