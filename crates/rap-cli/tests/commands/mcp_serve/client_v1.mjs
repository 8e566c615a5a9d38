// Talks to an MCP server with the TypeScript SDK of the first generation: client_v1.mjs stdio COMMAND… or http URL.

import assert from "node:assert";
import { Client } from "@modelcontextprotocol/sdk/client/index.js";
import { StdioClientTransport } from "@modelcontextprotocol/sdk/client/stdio.js";
import { StreamableHTTPClientTransport } from "@modelcontextprotocol/sdk/client/streamableHttp.js";
import { ElicitRequestSchema, ResourceUpdatedNotificationSchema } from "@modelcontextprotocol/sdk/types.js";

const [kind, ...target] = process.argv.slice(2);
const transport = kind === "stdio"
  ? new StdioClientTransport({ command: target[0], args: target.slice(1) })
  : new StreamableHTTPClientTransport(new URL(target[0]));
const client = new Client({ name: "test", version: "1" }, { capabilities: { elicitation: {} } });
client.setRequestHandler(ElicitRequestSchema, async (request) => {
  assert.equal(request.params.message, "Which colour?");
  return { action: "accept", content: { choice: "blue" } };
});
const updated = new Promise((resolve) => {
  client.setNotificationHandler(ResourceUpdatedNotificationSchema, (message) => resolve(message.params.uri));
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
await client.callTool({ name: "test_tool_with_progress", arguments: {} }, undefined, { onprogress });
assert.deepEqual(progress, ["begin", "half", "done"]);

// A call that is given up is cancelled.
const stop = new AbortController();
const slow = client.callTool({ name: "slow", arguments: { seconds: 100 } }, undefined, { signal: stop.signal });
setTimeout(() => stop.abort(), 200);
await assert.rejects(slow);

const confirmed = await client.callTool({ name: "tick", arguments: {} });
const uri = confirmed.content.at(-1).uri;
await client.subscribeResource({ uri });
assert.equal(await updated, uri);
const read = await client.readResource({ uri });
assert(read.contents[0].text.includes("tick 1"), JSON.stringify(read));

// A call as a task: its state, its result, the list, and its cancellation.
const tasks = client.experimental.tasks;
const seen = [];
for await (const message of tasks.callToolStream({ name: "slow", arguments: { seconds: 0.3 } }, undefined, { task: { ttl: 60000 } })) {
  seen.push(message);
}
assert.equal(seen[0].type, "taskCreated", JSON.stringify(seen));
assert.equal(seen.at(-1).result?.content[0].text, "slept 0.3", JSON.stringify(seen));
const { taskId } = seen[0].task;
assert.equal((await tasks.getTask(taskId)).status, "completed");
assert.deepEqual((await tasks.listTasks()).tasks.map((task) => task.taskId), [taskId]);
const stream = tasks.callToolStream({ name: "slow", arguments: { seconds: 100 } }, undefined, { task: { ttl: 60000 } });
const second = (await stream.next()).value.task.taskId;
await tasks.cancelTask(second);
assert.equal((await tasks.getTask(second)).status, "cancelled");
await stream.return();
await client.close();
