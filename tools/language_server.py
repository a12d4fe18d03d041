"""The language server of `shard-lsp`: errors with their fixes, types and layouts with who decided
on them, definitions, completions, symbols.

A text is analysed in a thread when its editor rests. Requests for names need no analysis, so they
are answered at once, whatever state the text is in.
"""

import asyncio
import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

from lsprotocol import types as lsp
from pygls.lsp.server import LanguageServer

from shardir import __version__
from shardir.diagnostics import Diagnostic
from shardir.editor.analysis import Analysis, analyse
from shardir.editor.completion import Completion, completions, ops, word_before
from shardir.editor.fixes import Fix, fix_of
from shardir.editor.index import NameToken, Symbol, TextIndex

REST_SECONDS = 0.2
"""The time without a change after which a text is analysed."""

KINDS = {
    "value": lsp.CompletionItemKind.Variable, "symbol": lsp.CompletionItemKind.Function,
    "alias": lsp.CompletionItemKind.Constant, "axis": lsp.CompletionItemKind.EnumMember,
    "op": lsp.CompletionItemKind.Function, "attribute": lsp.CompletionItemKind.Class,
    "pass": lsp.CompletionItemKind.Module, "option": lsp.CompletionItemKind.Property,
    "mode": lsp.CompletionItemKind.Module, "preset": lsp.CompletionItemKind.Value,
}  # fmt: skip
SEVERITIES = {
    "error": lsp.DiagnosticSeverity.Error, "warning": lsp.DiagnosticSeverity.Warning,
}  # fmt: skip
CODE = re.compile(r"\[([A-Z]\d+)\]")
PART = re.compile(r"\b(operand|result|argument) (\d+)\b")


class Document:
    """One version of a text: its names at once, its analysis when it is asked for.

    Args:
        encoding: the unit of columns of the client: `utf-8`, `utf-16` or `utf-32`.
    """

    def __init__(self, text: str, name: str, encoding: str):
        self.text, self.name, self.encoding = text, name, encoding
        self.index = TextIndex(text)
        self.starts = [0, *(m.end() for m in re.finditer("\n", text))]
        self._analysis: asyncio.Task[Analysis] | None = None

    async def analysis(self) -> Analysis:
        """Return the analysis, which is made once, in a thread."""
        if self._analysis is None:
            work = asyncio.to_thread(analyse, self.text, self.name)
            self._analysis = asyncio.create_task(work)
        return await asyncio.shield(self._analysis)

    def _units(self, text: str) -> int:
        if self.encoding == "utf-32":
            return len(text)
        coded = text.encode("utf-8" if self.encoding == "utf-8" else "utf-16-le", "surrogatepass")
        return len(coded) // (1 if self.encoding == "utf-8" else 2)

    def offset(self, position: lsp.Position) -> int:
        """Return the offset of a position; one beyond the end of a line is its end."""
        if position.line >= len(self.starts):
            return len(self.text)
        start = self.starts[position.line]
        end = self.text.find("\n", start)
        line = self.text[start : end if end >= 0 else len(self.text)]
        units = 0
        for i, character in enumerate(line):
            if units >= position.character:
                return start + i
            units += self._units(character)
        return start + len(line)

    def position(self, offset: int) -> lsp.Position:
        line = self.text.count("\n", 0, offset)
        return lsp.Position(line, self._units(self.text[self.starts[line] : offset]))

    def range(self, start: int, end: int) -> lsp.Range:
        return lsp.Range(self.position(start), self.position(end))

    def range_of(self, d: Diagnostic) -> lsp.Range:
        """The range of a diagnostic; one without a place is at the start."""
        start, end = self.offsets_of(d)
        return self.range(start, end)

    def offsets_of(self, d: Diagnostic) -> tuple[int, int]:
        """Return the range of a diagnostic: of the operand, result or argument that its message
        names, else its own."""
        if not 0 < d.line <= len(self.starts):
            return 0, 0
        start = min(self.starts[d.line - 1] + max(0, d.column - 1), len(self.text))
        if (named := PART.search(d.message)) is not None:
            part = self.index.part(start, named[1], int(named[2]))
            if part is not None:
                return part.start, part.end
        return start, min(start + d.length, len(self.text))


class Server(LanguageServer):
    """The server, and the present version of each open text."""

    def __init__(self) -> None:
        super().__init__("shard-lsp", f"v{__version__}")
        self.documents: dict[str, Document] = {}
        self.waiting: dict[str, asyncio.Task[None]] = {}

    def open(self, uri: str) -> None:
        """Take the present text of a document, and publish its errors when it rests."""
        text = self.workspace.get_text_document(uri)
        name = Path(unquote(urlsplit(uri).path)).name or uri
        encoding = str(getattr(self.workspace.position_encoding, "value", "utf-16"))
        self.documents[uri] = Document(text.source, name, encoding)
        if (waiting := self.waiting.get(uri)) is not None:
            waiting.cancel()
        self.waiting[uri] = asyncio.create_task(self.check(uri, text.version))

    async def check(self, uri: str, version: int | None) -> None:
        await asyncio.sleep(REST_SECONDS)
        document = self.documents[uri]
        analysis = await document.analysis()
        if self.documents.get(uri) is document:
            self.text_document_publish_diagnostics(
                lsp.PublishDiagnosticsParams(
                    uri, [diagnostic(document, d) for d in analysis.diagnostics], version
                )
            )

    def close(self, uri: str) -> None:
        self.documents.pop(uri, None)
        if (waiting := self.waiting.pop(uri, None)) is not None:
            waiting.cancel()
        self.text_document_publish_diagnostics(lsp.PublishDiagnosticsParams(uri, []))


def diagnostic(document: Document, d: Diagnostic) -> lsp.Diagnostic:
    code = CODE.search(d.message)
    return lsp.Diagnostic(
        document.range_of(d), "\n".join([d.message, *d.notes]), SEVERITIES.get(d.severity),
        code[1] if code else None, source="shardir",
    )  # fmt: skip


def action(document: Document, uri: str, d: Diagnostic, fix: Fix) -> lsp.CodeAction:
    edit = lsp.TextEdit(document.range(fix.start, fix.end), fix.new)
    return lsp.CodeAction(
        f"Replace {fix.old} by {fix.new}", lsp.CodeActionKind.QuickFix,
        [diagnostic(document, d)], is_preferred=True, edit=lsp.WorkspaceEdit({uri: [edit]}),
    )  # fmt: skip


def describe_name(document: Document, token: NameToken) -> str | None:
    """Return what is known of a token without an analysis, as Markdown: the statement of a symbol
    or an alias, the size of an axis, the form of an op."""
    definition = document.index.definition(token)
    if token.kind == "word":
        for op in ops():
            if op.name == token.text:
                return f"**{op.name}** `{op.detail}`\n\n{op.documentation}"
        if definition is None:
            return None
    if definition is None or definition.kind == "value":
        return None
    start, end = document.index.statement(definition.start)
    first, *others = document.text[start:end].strip().split("\n")
    return f"```mlir\n{first}{' ...' if others and first.endswith('(') else ''}\n```"


def symbol_of(document: Document, symbol: Symbol) -> lsp.DocumentSymbol:
    kinds = {"func.func": lsp.SymbolKind.Function, "dist.mesh": lsp.SymbolKind.Namespace}
    child = lsp.SymbolKind.EnumMember if symbol.is_mesh else lsp.SymbolKind.Variable
    end = max(symbol.end, symbol.name.end, *(t.end for t in symbol.parts.values()), 0)
    return lsp.DocumentSymbol(
        symbol.name.text, kinds.get(symbol.op.text, lsp.SymbolKind.Event),
        document.range(symbol.start, end), document.range(symbol.name.start, symbol.name.end),
        detail=symbol.op.text,
        children=[
            lsp.DocumentSymbol(name, child, place := document.range(t.start, t.end), place)
            for name, t in symbol.parts.items()
        ],
    )  # fmt: skip


def make_server() -> Server:
    """Return a server with all features."""
    server = Server()

    @server.feature(lsp.TEXT_DOCUMENT_DID_OPEN)
    async def did_open(params: lsp.DidOpenTextDocumentParams) -> None:
        server.open(params.text_document.uri)

    @server.feature(lsp.TEXT_DOCUMENT_DID_CHANGE)
    async def did_change(params: lsp.DidChangeTextDocumentParams) -> None:
        server.open(params.text_document.uri)

    @server.feature(lsp.TEXT_DOCUMENT_DID_CLOSE)
    async def did_close(params: lsp.DidCloseTextDocumentParams) -> None:
        server.close(params.text_document.uri)

    @server.feature(lsp.TEXT_DOCUMENT_HOVER)
    async def hover(params: lsp.HoverParams) -> lsp.Hover | None:
        document = server.documents[params.text_document.uri]
        token = document.index.token_at(document.offset(params.position))
        if token is None:
            return None
        text = describe_name(document, token)
        definition = document.index.definition(token) if token.kind == "value" else None
        if definition is not None:
            text = (await document.analysis()).describe(definition.start, token.text)
        if text is None:
            return None
        content = lsp.MarkupContent(lsp.MarkupKind.Markdown, text)
        return lsp.Hover(content, document.range(token.start, token.end))

    @server.feature(lsp.TEXT_DOCUMENT_DEFINITION)
    async def definition(params: lsp.DefinitionParams) -> lsp.Location | None:
        uri = params.text_document.uri
        document = server.documents[uri]
        token = document.index.token_at(document.offset(params.position))
        found = document.index.definition(token) if token is not None else None
        return lsp.Location(uri, document.range(found.start, found.end)) if found else None

    triggers = lsp.CompletionOptions(trigger_characters=["%", "@", "#", ".", "{"])

    @server.feature(lsp.TEXT_DOCUMENT_COMPLETION, triggers)
    async def completion(params: lsp.CompletionParams) -> list[lsp.CompletionItem]:
        document = server.documents[params.text_document.uri]
        offset = document.offset(params.position)
        word = word_before(document.text, offset)
        place = document.range(offset - len(word), offset)
        return [item(place, c) for c in completions(document.index, offset)]

    @server.feature(lsp.TEXT_DOCUMENT_DOCUMENT_SYMBOL)
    async def symbols(params: lsp.DocumentSymbolParams) -> list[lsp.DocumentSymbol]:
        document = server.documents[params.text_document.uri]
        return [symbol_of(document, s) for s in document.index.symbols]

    kinds = lsp.CodeActionOptions(code_action_kinds=[lsp.CodeActionKind.QuickFix])

    @server.feature(lsp.TEXT_DOCUMENT_CODE_ACTION, kinds)
    async def actions(params: lsp.CodeActionParams) -> list[lsp.CodeAction]:
        uri = params.text_document.uri
        document = server.documents[uri]
        first, last = document.offset(params.range.start), document.offset(params.range.end)
        analysis = await document.analysis()
        offered: list[lsp.CodeAction] = []
        for d in analysis.diagnostics:
            start, end = document.offsets_of(d)
            if start <= last and end >= first:
                fix = fix_of(d, analysis.source, document.index.statement(start))
                offered += [action(document, uri, d, fix)] if fix is not None else []
        return offered

    return server


def item(place: lsp.Range, c: Completion) -> lsp.CompletionItem:
    about = lsp.MarkupContent(lsp.MarkupKind.Markdown, c.documentation) if c.documentation else None
    return lsp.CompletionItem(
        c.name, kind=KINDS[c.kind], detail=c.detail or None, documentation=about,
        filter_text=c.name, text_edit=lsp.TextEdit(place, c.name),
    )  # fmt: skip
