"""LALR(1) grammars: their tables, computed by Lark and retained on disk, and the loop that runs
them."""
