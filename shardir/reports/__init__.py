"""Reports for people: why values have their layouts, and what redistributions cost."""
