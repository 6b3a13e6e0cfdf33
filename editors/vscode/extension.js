// The client: starts `meshdsl lsp`, shows the layout in the status bar, and lets it be chosen.
"use strict";

const vscode = require("vscode");
const { LanguageClient } = require("vscode-languageclient/node");

let client;
let status;

/** Starts the server with the command of the settings; says what to do where there is none. */
async function start() {
  const [command, ...args] = vscode.workspace.getConfiguration("meshdsl").get("command");
  client = new LanguageClient(
    "meshdsl",
    "meshdsl",
    { command, args },
    {
      documentSelector: [{ language: "mdsl" }],
      synchronize: { configurationSection: "meshdsl" },
    },
  );
  try {
    await client.start();
  } catch (error) {
    const told = `meshdsl: \`${command}\` could not be started (${error.message ?? error}).`;
    const answer = await vscode.window.showErrorMessage(`${told} Is it installed?`, "Settings");
    if (answer) {
      await vscode.commands.executeCommand("workbench.action.openSettings", "meshdsl.command");
    }
  }
}

/** The document of the active editor if it is a program. */
function active() {
  const document = vscode.window.activeTextEditor?.document;
  return document?.languageId === "mdsl" ? document : undefined;
}

/** Asks the server something; undefined where it does not run or refuses. */
async function ask(command, ...args) {
  if (!client?.isRunning()) {
    return undefined;
  }
  try {
    return await client.sendRequest("workspace/executeCommand", { command, arguments: args });
  } catch (error) {
    client.warn(`${command}: ${error.message}`);
    return undefined;
  }
}

function uriOf(document) {
  return client.code2ProtocolConverter.asUri(document.uri);
}

/** Lets the user choose a layout for the active program. */
async function pickLayout() {
  const document = active();
  const found = document && (await ask("meshdsl.layouts", uriOf(document)));
  if (!found?.layouts.length) {
    return;
  }
  const items = found.layouts.map((label) => ({
    label,
    description: label === found.chosen ? "chosen" : "",
  }));
  const answer = await vscode.window.showQuickPick(items, { placeHolder: "The layout to show" });
  if (answer) {
    await ask("meshdsl.chooseLayout", uriOf(document), answer.label);
    await show();
  }
}

/** Shows the chosen layout, and what it costs, in the status bar. */
async function show() {
  const document = active();
  const found = document && client && (await ask("meshdsl.layouts", uriOf(document)));
  if (!found?.chosen || document !== active()) {
    status.hide();
    return;
  }
  status.text = `$(server-environment) ${found.chosen}`;
  status.tooltip = [...found.cost, "Choose another layout"].join("\n");
  status.show();
}

/** Ends the server; a client whose server never started has none to end, and refuses to. */
async function stop() {
  if (client?.isRunning()) {
    await client.dispose();
  }
  client = undefined;
}

async function restart() {
  await stop();
  await start();
  await show();
}

async function activate(context) {
  status = vscode.window.createStatusBarItem(vscode.StatusBarAlignment.Right, 50);
  status.command = "meshdsl.pickLayout";
  context.subscriptions.push(
    status,
    vscode.commands.registerCommand("meshdsl.pickLayout", pickLayout),
    vscode.commands.registerCommand("meshdsl.restart", restart),
    vscode.window.onDidChangeActiveTextEditor(show),
    vscode.languages.onDidChangeDiagnostics(show),
    vscode.workspace.onDidChangeConfiguration((event) =>
      event.affectsConfiguration("meshdsl.command") ? restart() : undefined,
    ),
  );
  await start();
  await show();
}

async function deactivate() {
  await stop();
}

module.exports = { activate, deactivate };
