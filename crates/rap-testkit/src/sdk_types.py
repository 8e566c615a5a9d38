"""Validates requests against the types of the official SDKs. Each line of stdin is {"api": ..., "body": ...}."""

import json
import sys

from anthropic.types.message_create_params import MessageCreateParamsStreaming
from openai.types.chat.completion_create_params import CompletionCreateParamsStreaming
from openai.types.responses.response_create_params import ResponseCreateParamsStreaming
from pydantic import TypeAdapter

TYPES = {
    "anthropic": TypeAdapter(MessageCreateParamsStreaming),
    "openai": TypeAdapter(CompletionCreateParamsStreaming),
    "openai-responses": TypeAdapter(ResponseCreateParamsStreaming),
}


def consume(value):
    """Reads all iterators, because their items are validated only then."""
    if isinstance(value, dict):
        return {key: consume(item) for key, item in value.items()}
    if value is None or isinstance(value, (str, bytes, bool, int, float)):
        return value
    return [consume(item) for item in value]


count = 0
for line in sys.stdin:
    request = json.loads(line)
    try:
        consume(TYPES[request["api"]].validate_python(request["body"]))
    except ValueError as error:
        sys.exit(f"{request['api']}: {error}\n{json.dumps(request['body'], indent=1)}")
    count += 1
print(count)
