"""The page of a report: one HTML file with its data, its script and its style, and no request.

What a program names (values, files, plans) is data: the script of the folder `template` shows it as
text, and no `<` of it is in the file.
"""

from html import escape
from importlib.resources import files
from pathlib import Path

from shardir.reports.record import ReportRecord
from shardir.syntax.files import write_text

FOLDER = files("shardir.reports") / "template"

UPLOT = "https://github.com/leeoniya/uPlot"


def html(record: ReportRecord) -> str:
    """Return the text of the page."""
    # `</script>` and `<!--` would end or change the element of the data; in JSON < is \u003c too.
    data = record.json().replace("<", "\\u003c")
    parts = {
        "TITLE": escape(record.title),
        "LICENCE": f"uPlot ({UPLOT})\n\n{_text('uPlot.LICENSE')}",
        "STYLE": f"{_text('uPlot.min.css')}\n{_text('page.css')}",
        "DATA": data,
        "LIBRARY": _text("uPlot.iife.min.js"),
        "SCRIPT": "\n".join(map(_text, ("text.js", "charts.js", "sections.js", "page.js"))),
    }
    page = _text("page.html")
    for name, text in parts.items():
        before, mark, after = page.partition(f"{{{{{name}}}}}")
        assert mark, name
        page = f"{before}{text}{after}"
    return page


def write_page(path: Path, record: ReportRecord) -> None:
    """Write the page to a file. Raises ShardirError where it cannot be written."""
    write_text(path, html(record))


def _text(name: str) -> str:
    return (FOLDER / name).read_text("utf-8")
