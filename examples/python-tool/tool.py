"""A RAP tool server in plain Python, without any package: three tools here, the protocol in rap.py beside it.

All it knows is in memory: when the process ends, acknowledged calls and confirmed subscriptions are lost. README.md
names this and every other limit.

A tool is a function of the call and its arguments, which fit the schema. It returns the text of the result; an
exception `rap.Refused(sentence)` becomes an error that the model can act on. What takes long looks at
`call.stopped`, which is set when the call is cancelled or its thread closed.
"""
import rap

SECONDS = {"type": "number", "minimum": 0, "maximum": 86400}


@rap.tool("Counts the words of a text. Takes no time.", {"text": {"type": "string"}})
def word_count(call, arguments):
    return str(len(arguments["text"].split()))


@rap.tool("Waits for some seconds.", {"seconds": SECONDS})
def wait(call, arguments):
    call.stopped.wait(arguments["seconds"])
    return f"waited {arguments['seconds']}"


@rap.tool(
    "Subscribes to a countdown: one event for each number, the last one is 0.",
    {"from": {"type": "integer", "minimum": 0, "maximum": 1000}, "every_seconds": SECONDS},
)
def countdown(call, arguments):
    start = arguments["from"]
    wanted = call.confirm(f"Counting down from {start}. Subscription ID: {call.id}")
    for number in range(start, -1, -1):
        if not wanted or call.stopped.wait(arguments["every_seconds"]):
            return
        wanted = call.event(str(number), final=number == 0)


if __name__ == "__main__":
    rap.serve("python-tool", port=7503)
