"""Talks to an MCP server with the Python SDK of the first generation: client_v1.py stdio COMMAND… or http URL."""

import asyncio
import sys
from contextlib import asynccontextmanager

from mcp import ClientSession, StdioServerParameters, types
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamablehttp_client
from pydantic import AnyUrl


@asynccontextmanager
async def connected(transport, *target):
    if transport == "stdio":
        parameters = StdioServerParameters(command=target[0], args=list(target[1:]))
        async with stdio_client(parameters) as (read, write):
            yield read, write
    else:
        async with streamablehttp_client(target[0]) as (read, write, _):
            yield read, write


async def main():
    updated, progress = asyncio.Queue(), []

    async def elicited(context, params):
        assert params.message == "Which colour?", params
        return types.ElicitResult(action="accept", content={"choice": "blue"})

    async def received(message):
        if isinstance(message, types.ServerNotification):
            if isinstance(message.root, types.ResourceUpdatedNotification):
                await updated.put(str(message.root.params.uri))

    async def reported(done, total, text):
        progress.append((done, total, text))

    async with connected(*sys.argv[1:]) as (read, write):
        async with ClientSession(read, write, elicitation_callback=elicited, message_handler=received) as session:
            await session.initialize()
            names = {tool.name for tool in (await session.list_tools()).tools}
            assert {"echo", "tick", "test_elicitation"} <= names, names
            echoed = await asyncio.gather(*(session.call_tool("echo", {"text": str(n)}) for n in range(20)))
            assert [r.content[0].text for r in echoed] == [f"echo {n}" for n in range(20)], echoed
            failed = await session.call_tool("test_error_handling", {})
            assert failed.isError and failed.content[0].text == "Error: on purpose", failed
            picture = await session.call_tool("test_image_content", {})
            assert picture.content[1].mimeType == "image/png", picture
            chosen = await session.call_tool("test_elicitation", {})
            assert chosen.content[0].text == "chose blue", chosen
            await session.call_tool("test_tool_with_progress", {}, progress_callback=reported)
            assert [text for _, _, text in progress] == ["begin", "half", "done"], progress
            confirmed = await session.call_tool("tick", {})
            uri = confirmed.content[-1].uri
            await session.subscribe_resource(uri)
            assert await asyncio.wait_for(updated.get(), 30) == str(uri)
            read_back = await session.read_resource(AnyUrl(uri))
            assert "tick 1" in read_back.contents[0].text, read_back

            # A call as a task: its state, its question, its result, the list, and its cancellation.
            tasks = session.experimental
            created = await tasks.call_tool_as_task("test_elicitation", {}, ttl=60000)
            task = created.task.taskId
            chosen = await tasks.get_task_result(task, types.CallToolResult)
            assert chosen.content[0].text == "chose blue", chosen
            assert (await tasks.get_task(task)).status == "completed"
            assert [listed.taskId for listed in (await tasks.list_tasks()).tasks] == [task]
            slow = (await tasks.call_tool_as_task("slow", {"seconds": 100}, ttl=60000)).task.taskId
            await tasks.cancel_task(slow)
            assert (await tasks.get_task(slow)).status == "cancelled"


asyncio.run(asyncio.wait_for(main(), 120))
