"""The parts that passes share: no pass imports a pass."""
