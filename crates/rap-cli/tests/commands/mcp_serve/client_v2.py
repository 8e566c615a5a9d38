"""Talks to an MCP server with the Python SDK of the second generation: client_v2.py MODE stdio COMMAND… or http URL. MODE is
`legacy` for a handshake, or a protocol version that has none."""

import asyncio
import sys

from mcp import Client, StdioServerParameters, types


async def main():
    mode, transport, *target = sys.argv[1:]
    server = StdioServerParameters(command=target[0], args=target[1:]) if transport == "stdio" else target[0]
    progress = []

    async def elicited(context, params):
        assert params.message == "Which colour?", params
        return types.ElicitResult(action="accept", content={"choice": "blue"})

    async def reported(done, total, text):
        progress.append(text)

    async with Client(server, mode=mode, elicitation_callback=elicited) as client:
        expected = "2025-11-25" if mode == "legacy" else mode
        assert client.protocol_version == expected, client.protocol_version
        names = {tool.name for tool in (await client.list_tools()).tools}
        assert {"echo", "tick", "test_elicitation"} <= names, names
        echoed = await asyncio.gather(*(client.call_tool("echo", {"text": str(n)}) for n in range(20)))
        assert [r.content[0].text for r in echoed] == [f"echo {n}" for n in range(20)], echoed
        failed = await client.call_tool("test_error_handling", {})
        assert failed.is_error and failed.content[0].text == "Error: on purpose", failed
        chosen = await client.call_tool("test_elicitation", {})
        assert chosen.content[0].text == "chose blue", chosen
        await client.call_tool("test_tool_with_progress", {}, progress_callback=reported)
        assert progress == ["begin", "half", "done"], progress
        confirmed = await client.call_tool("tick", {})
        uri = str(confirmed.content[-1].uri)
        for _ in range(100):
            read_back = await client.read_resource(uri, cache_mode="bypass")
            if "tick 1" in read_back.contents[0].text:
                break
            await asyncio.sleep(0.1)
        else:
            raise AssertionError(read_back)


asyncio.run(asyncio.wait_for(main(), 120))
