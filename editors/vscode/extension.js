// Starts the language server of shardir, and ends it with the window.
const vscode = require("vscode");
const { LanguageClient, TransportKind } = require("vscode-languageclient/node");

let client;

exports.activate = function () {
  const command = vscode.workspace.getConfiguration("shardir").get("server");
  const folder = vscode.workspace.workspaceFolders?.[0]?.uri.fsPath;
  const server = { command, transport: TransportKind.stdio, options: { cwd: folder } };
  client = new LanguageClient("shardir", "shardir", server, {
    documentSelector: [{ language: "shardir" }],
  });
  return client.start();
};

exports.deactivate = () => client?.stop();
