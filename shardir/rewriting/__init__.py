"""Shared by passes: bases, options, the rewriter, and transformations that several passes do."""
