"""What editors show of a text: names, errors with their fixes, layouts, completions.

    index.py        names by a scan of the text, which may be broken in any way
    analysis.py     errors, and the values and layouts of a program without them
    fixes.py        replacements that messages propose
    completion.py   what may stand at a place

Offsets count characters from the start of the text; tools/lsp.py makes positions of them.
"""
