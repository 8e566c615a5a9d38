// Talks to an MCP server with the TypeScript SDK of the second generation: client_v2.mjs MODE stdio COMMAND… or http URL.
// MODE is `legacy` for a handshake, or a protocol version that has none.

import assert from "node:assert";
import { Client, StreamableHTTPClientTransport } from "@modelcontextprotocol/client";
import { StdioClientTransport } from "@modelcontextprotocol/client/stdio";

const [mode, kind, ...target] = process.argv.slice(2);
const transport = kind === "stdio"
  ? new StdioClientTransport({ command: target[0], args: target.slice(1) })
  : new StreamableHTTPClientTransport(new URL(target[0]));
const client = new Client({ name: "test", version: "1" }, {
  capabilities: { elicitation: { form: {} } },
  versionNegotiation: { mode: mode === "legacy" ? "legacy" : { pin: mode } },
});
client.setRequestHandler("elicitation/create", async (request) => {
  assert.equal(request.params.message, "Which colour?");
  return { action: "accept", content: { choice: "blue" } };
});
await client.connect(transport);

const names = (await client.listTools()).tools.map((tool) => tool.name);
assert(names.includes("echo") && names.includes("tick"), names.join());
const calls = [...Array(20).keys()].map((n) => client.callTool({ name: "echo", arguments: { text: String(n) } }));
const echoed = (await Promise.all(calls)).map((result) => result.content[0].text);
assert.deepEqual(echoed, [...Array(20).keys()].map((n) => `echo ${n}`));
const failed = await client.callTool({ name: "test_error_handling", arguments: {} });
assert(failed.isError && failed.content[0].text === "Error: on purpose", JSON.stringify(failed));
const chosen = await client.callTool({ name: "test_elicitation", arguments: {} });
assert.equal(chosen.content[0].text, "chose blue");
const progress = [];
const onprogress = (report) => progress.push(report.message);
await client.callTool({ name: "test_tool_with_progress", arguments: {} }, { onprogress });
assert.deepEqual(progress, ["begin", "half", "done"]);

const confirmed = await client.callTool({ name: "tick", arguments: {} });
const uri = confirmed.content.at(-1).uri;
let read;
for (let attempt = 0; attempt < 100; attempt += 1) {
  read = await client.readResource({ uri }, { cacheMode: "bypass" });
  if (read.contents[0].text.includes("tick 1")) break;
  await new Promise((resolve) => setTimeout(resolve, 100));
}
assert(read.contents[0].text.includes("tick 1"), JSON.stringify(read));
await client.close();
