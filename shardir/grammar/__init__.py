"""LALR(1) parsing: tables, computed by Lark and retained on disk, and the loop that runs them."""
