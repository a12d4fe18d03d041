"""A client of a language server: JSON-RPC over the pipes of a process."""

import json
import queue
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

LIMIT_SECONDS = 60
COMMAND = [sys.executable, "-c", "from shardir.tools.commands import lsp; raise SystemExit(lsp())"]

Position = dict[str, int]


def position_in(text: str, offset: int) -> Position:
    """Return the line and the column, in UTF-16, of an offset."""
    before = text[:offset].split("\n")
    return {"line": len(before) - 1, "character": len(before[-1].encode("utf-16-le")) // 2}


def range_in(text: str, offset: int, word: str) -> dict[str, Position]:
    """Return the range of a word that begins at an offset."""
    assert text.startswith(word, offset)
    return {"start": position_in(text, offset), "end": position_in(text, offset + len(word))}


class Client:
    """A session with a server that this starts."""

    def __init__(self) -> None:
        self.server = subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.answers: queue.Queue[Any] = queue.Queue()
        self.published: dict[tuple[str, int], list[Any]] = {}
        """The diagnostics of each version of a document."""
        self.ids = 0
        self.versions: dict[str, int] = {}
        threading.Thread(target=self._read, daemon=True).start()
        self.request("initialize", processId=None, rootUri=None, capabilities={})
        self._send(method="initialized", params={})

    def _read(self) -> None:
        assert self.server.stdout is not None
        while line := self.server.stdout.readline():
            size = int(line.split(b":")[1])
            while self.server.stdout.readline().strip():
                pass  # further headers
            self.answers.put(json.loads(self.server.stdout.read(size)))

    def _send(self, **message: Any) -> None:
        data = json.dumps({"jsonrpc": "2.0", **message}).encode()
        assert self.server.stdin is not None
        self.server.stdin.write(b"Content-Length: %d\r\n\r\n%s" % (len(data), data))
        self.server.stdin.flush()

    def _receive(self) -> Any:
        message = self.answers.get(timeout=LIMIT_SECONDS)
        if message.get("method") == "textDocument/publishDiagnostics":
            found = message["params"]
            self.published[found["uri"], found.get("version", 0)] = found["diagnostics"]
        assert message.get("method") != "window/showMessage", message  # an exception of the server
        return message

    def request(self, method: str, **params: Any) -> Any:
        """Return the result of a request. What the server publishes meanwhile is kept."""
        self.ids += 1
        self._send(id=self.ids, method=method, params=params)
        while (message := self._receive()).get("id") != self.ids:
            pass
        assert "error" not in message, message["error"]
        return message["result"]

    def open(self, name: str, text: str) -> str:
        """Show a text to the server, a new version if it is open; return its URI."""
        uri = Path("/program", name).as_uri()
        version = self.versions[uri] = self.versions.get(uri, 0) + 1
        document = {"uri": uri, "version": version}
        if version == 1:
            document |= {"languageId": "shardir", "text": text}
            self._send(method="textDocument/didOpen", params={"textDocument": document})
        else:
            params = {"textDocument": document, "contentChanges": [{"text": text}]}
            self._send(method="textDocument/didChange", params=params)
        return uri

    def diagnostics(self, uri: str) -> list[Any]:
        """Wait for the diagnostics of the present version."""
        while (uri, self.versions[uri]) not in self.published:
            self._receive()
        return self.published[uri, self.versions[uri]]

    def at(self, method: str, uri: str, position: Position) -> Any:
        return self.request(f"textDocument/{method}", textDocument={"uri": uri}, position=position)

    def close(self) -> int:
        """End the session; return the exit code of the server."""
        self.request("shutdown")
        self._send(method="exit", params={})
        return self.server.wait(LIMIT_SECONDS)
