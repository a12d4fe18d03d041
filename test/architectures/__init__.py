"""Architectures with tiny random configurations, by which the import of modules is tested."""

from architectures.architecture import Architecture, Example, doubles, export, export_loss
from architectures.networks import NETWORKS
from architectures.sequences import SEQUENCES
from architectures.text import TEXT
from architectures.vision import VISION

__all__ = ["UNEXPORTABLE", "ZOO", "Architecture", "Example", "doubles", "export", "export_loss"]

_ALL = {a.name: a for a in (*SEQUENCES, *NETWORKS, *TEXT, *VISION)}

ZOO = {name: a for name, a in _ALL.items() if not a.unexportable}
"""Those whose loss torch.export takes, by name."""

UNEXPORTABLE = {name: a for name, a in _ALL.items() if a.unexportable}
"""The others, each with the reason."""
