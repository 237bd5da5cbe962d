"""A process that partitions graphs with igraph or leidenalg: ``python -m ckv_compile.community.engine_process``.

Both hold the GIL for a whole call and neither is thread-safe, so they run outside the process that decodes. Frames on
standard input and output are a length (8 bytes, little endian) and a pickle. The process ends with its standard input.
"""

from __future__ import annotations

import os
import pickle
import random
import struct
import sys
import traceback
from typing import IO, Any

import numpy as np

HEADER = struct.Struct("<Q")


def write_frame(stream: IO[bytes], message: Any) -> None:
    payload = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    stream.write(HEADER.pack(len(payload)))
    stream.write(payload)
    stream.flush()


def read_frame(stream: IO[bytes]) -> Any:
    """The next message; EOFError when the other side is gone."""
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        raise EOFError("the stream ended")
    (length,) = HEADER.unpack(header)
    payload = stream.read(length)
    if len(payload) < length:
        raise EOFError("the stream ended inside a message")
    return pickle.loads(payload)


def partition_edges(
    engine: str,
    num_nodes: int,
    edges: np.ndarray,
    weights: np.ndarray,
    gamma: float,
    passes: int,
    initial: np.ndarray | None,
    seed: int,
) -> np.ndarray:
    """Labels int32 [num_nodes] by a named engine, in this process. edges: int32 [E, 2]. passes must be positive."""
    import igraph

    if passes < 1:  # a negative count means "until stable", which a released igraph stopped too early
        raise ValueError(f"passes must be at least 1, got {passes}")
    graph = igraph.Graph(n=num_nodes, edges=edges)
    weights = np.asarray(weights, np.float64)
    start = None if initial is None else initial.tolist()
    if engine == "igraph":
        igraph.set_random_number_generator(random.Random(seed))
        membership = graph.community_leiden(
            objective_function="modularity", weights=weights, resolution=gamma, n_iterations=passes,
            initial_membership=start,
        ).membership  # fmt: skip
    elif engine == "leidenalg":
        import leidenalg

        membership = leidenalg.find_partition(
            graph, leidenalg.RBConfigurationVertexPartition, weights=weights.tolist(), resolution_parameter=gamma,
            n_iterations=passes, initial_membership=start, seed=seed,
        ).membership  # fmt: skip
    else:
        raise ValueError(f"engine must be 'igraph' or 'leidenalg', got {engine!r}")
    return np.asarray(membership, np.int32)


def main() -> None:
    requests = sys.stdin.buffer
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints must not reach the stream of replies
    while True:
        try:
            request = read_frame(requests)
        except EOFError:
            return
        try:
            reply: tuple = ("labels", partition_edges(**request))
        except BaseException as error:  # leidenalg raises bare BaseException
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            reply = ("error", f"{type(error).__name__}: {error}", traceback.format_exc())
        try:
            write_frame(replies, reply)
        except BrokenPipeError:
            return


if __name__ == "__main__":
    main()
