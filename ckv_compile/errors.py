"""Exceptions that a caller may want to handle; wrong arguments raise ``ValueError`` or ``TypeError`` instead."""


class CommunityKVError(RuntimeError):
    """Base of the errors of this package."""


class PartitionError(CommunityKVError):
    """A partition failed. Reaches the caller only with ``strict=True``; otherwise contiguous pages stand in."""


class CaptureError(CommunityKVError):
    """A compiled step met a CUDA-graph capture in a state in which it cannot be captured."""
