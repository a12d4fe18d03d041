"""What a program costs: seconds and bytes of memory on a cluster."""

from shardir.cost import clusters

__all__ = ["clusters"]
