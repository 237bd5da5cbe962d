"""Mini-batch k-means of bounded cluster size."""

from __future__ import annotations

import numpy as np

BATCH = 1024  # points of a mini-batch
ROUNDS = 10  # mini-batches (ClusterKV and Multipole run a fixed few iterations too)


def _unit(points: np.ndarray) -> np.ndarray:
    norm = np.linalg.norm(points, axis=-1, keepdims=True)
    return points / np.where(norm > 0, norm, 1.0)


def _closeness(points: np.ndarray, centers: np.ndarray, cosine: bool) -> np.ndarray:
    """Larger is nearer, [n, k]: the cosine, or minus half the squared distance up to a number per point."""
    product = points @ centers.T
    return product if cosine else product - 0.5 * np.square(centers).sum(-1)


def kmeans(
    points: np.ndarray, clusters: int, *, cosine: bool, largest: int, seed: int = 0, stop: np.ndarray | None = None
) -> np.ndarray:
    """Cluster points by mini-batches (Sculley 2010, algorithm 1, with a batch's points of a centre taken together).

    points: float32 [n, D]. cosine: cluster directions (spherical k-means), else by Euclidean distance. Clusters of more
    than ``largest`` points are cut into parts of nearly equal size, by closeness to their centre. Centres start at
    ``clusters`` different points, drawn by ``seed``. stop: int32 [1]; when it becomes 1 the present centres are taken.
    Returns int32 [n], labels in [0, n).
    """
    n = len(points)
    if n == 0:
        return np.zeros(0, np.int32)
    clusters = min(clusters, n)
    points = _unit(points) if cosine else points
    random = np.random.default_rng(seed)
    centers = points[random.choice(n, clusters, replace=False)].copy()
    seen = np.zeros(clusters)
    for _ in range(ROUNDS):
        if stop is not None and stop[0]:
            break
        batch = points if n <= BATCH else points[random.choice(n, BATCH, replace=False)]
        nearest = _closeness(batch, centers, cosine).argmax(1)
        count = np.bincount(nearest, minlength=clusters)
        total = np.zeros_like(centers)
        np.add.at(total, nearest, batch)
        seen += count
        moved = count > 0
        # Step 1 / seen per point of the batch: centres are means of all the points that they were ever given.
        share = (count[moved] / seen[moved])[:, None]
        centers[moved] += share * (total[moved] / count[moved, None] - centers[moved])
        if cosine:
            centers = _unit(centers)
    closeness = _closeness(points, centers, cosine)
    nearest = closeness.argmax(1)
    labels = np.empty(n, np.int32)
    own = closeness[np.arange(n), nearest]
    order = np.lexsort((np.arange(n), -own, nearest))
    starts = np.flatnonzero(np.r_[True, np.diff(nearest[order]) > 0])
    label = 0
    for members in np.split(order, starts[1:]):
        for part in np.array_split(members, -(-len(members) // largest)):
            labels[part] = label
            label += 1
    return labels
