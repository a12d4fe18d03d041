"""What passes share: bases, options, the rewriter, and the steps that several passes take."""
