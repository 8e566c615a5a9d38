"""An MCP server that misbehaves on demand. Without arguments it uses stdio; with `http` it listens on a port of loopback,
which it prints. Only the standard library is used, so that nothing is done behind its back. Files in the directory
MCP_NOTES tell the test what happened."""

import json, os, sys, threading, time

NOTES = os.environ.get("MCP_NOTES", ".")
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
# With MCP_MODERN the server knows only the protocol version without handshake.
MODERN = bool(os.environ.get("MCP_MODERN"))
grown = False
waiting = {}      # answers of the client, by request id
cancelled = set()
tasks = {}
listeners = []    # clients without handshake that want to know of changes, with the ids of their requests


def note(name, text=""):
    with open(os.path.join(NOTES, name), "a") as file:
        file.write(text + "\n")


def schema(**properties):
    return {"type": "object", "properties": properties, "required": list(properties)}


def tools(client):
    text = {"type": "string"}
    listed = [
        {"name": "echo", "description": "Repeats a text.", "inputSchema": schema(text=text),
         "annotations": {"readOnlyHint": True}},
        {"name": "destroy", "inputSchema": schema(), "annotations": {"destructiveHint": True}},
        {"name": "research", "inputSchema": schema(seconds={"type": "number"}), "execution": {"taskSupport": "required"}},
        {"name": "dotted.name", "inputSchema": {}},
    ]
    plain = ["fail", "crash", "hang", "progress", "sample", "elicit", "grow", "garbage", "variable", "media", "huge", "secret"]
    listed += [{"name": name, "inputSchema": schema()} for name in plain]
    if client.user:
        listed.append({"name": f"only_for_{client.user}", "inputSchema": schema()})
    return listed + ([{"name": "grown", "inputSchema": schema()}] if grown else [])


def text(*items, error=False):
    return {"content": [{"type": "text", "text": item} for item in items], "isError": error}


def call(client, request, name, arguments):
    global grown
    token = request["params"].get("_meta", {}).get("progressToken")
    if name == "echo":
        return text(arguments["text"])
    if name.startswith("only_for_"):
        return text(f"for {client.user}")
    if name == "dotted.name":
        return text("dots")
    if name == "fail":
        return text("the disk is full", error=True)
    if name == "crash":
        note("crashed")
        os._exit(3)
    if name == "hang":
        note("hanging")
        while request["id"] not in cancelled:
            time.sleep(0.01)
        note("cancelled")
        return text("too late")
    if name == "progress":
        for step in range(1, 4):
            client.send({"method": "notifications/progress",
                         "params": {"progressToken": token, "progress": step, "total": 4, "message": f"step {step}"}})
        time.sleep(0.5)
        return text("done")
    if name == "sample":
        answer = client.ask("sampling/createMessage", {"messages": [], "maxTokens": 10})
        return text(json.dumps(answer.get("error") or answer["result"]))
    if name == "elicit":
        answer = client.ask("elicitation/create", {"message": "Which size?", "requestedSchema": {
            "type": "object", "properties": {"size": {"type": "string", "enum": ["small", "large"]}}, "required": ["size"]}})
        return text(json.dumps(answer.get("error") or answer["result"]))
    if name == "grow":
        grown = True
        for listener, number in listeners:
            meta = {"io.modelcontextprotocol/subscriptionId": number}
            listener.send({"method": "notifications/tools/list_changed", "params": {"_meta": meta}})
        if not MODERN:
            client.send({"method": "notifications/tools/list_changed"})
        return text("grown")
    if name == "huge":
        return text("x" * (17 * 1024 * 1024))
    if name == "garbage":
        sys.stdout.write("this is not JSON\n{\"jsonrpc\": 5}\n")
        sys.stdout.flush()
        return text("clean")
    if name == "variable":
        return text(f"{os.environ.get('MCP_SECRET')} {os.environ.get('RAP_TOKEN')} {os.environ.get('MCP_PLAIN')}")
    if name == "media":
        return {"content": [
            {"type": "text", "text": "look"}, {"type": "image", "data": PIXEL, "mimeType": "image/png"},
            {"type": "audio", "data": "AAAA", "mimeType": "audio/wav"},
            {"type": "resource", "resource": {"uri": "note://1", "text": "inside"}}]}
    if name in ("destroy", "secret"):
        return text(f"done: {name}")
    if name == "grown":
        return text("big")
    raise KeyError(name)


def start_task(params):
    number = str(len(tasks) + 1)
    seconds = params["arguments"]["seconds"]
    tasks[number] = {"taskId": number, "status": "working", "createdAt": "2026-01-01T00:00:00Z",
                     "lastUpdatedAt": "2026-01-01T00:00:00Z", "ttl": None, "pollInterval": 200, "statusMessage": "reading"}
    note("task")

    def finish():
        time.sleep(seconds)
        if tasks[number]["status"] == "working":
            tasks[number]["status"] = "completed"
    threading.Thread(target=finish, daemon=True).start()
    return {"task": tasks[number]}


def answer(client, request):
    method, params = request["method"], request.get("params") or {}
    capabilities = {"tools": {"listChanged": True}, "resources": {}, "prompts": {}, "tasks": {}}
    if method == "initialize" and not MODERN:
        note("started", str(os.getpid()))
        return {"protocolVersion": params["protocolVersion"], "serverInfo": {"name": "bad", "version": "1"},
                "capabilities": capabilities}
    if method == "server/discover" and MODERN:
        note("discovered")
        return {"resultType": "complete", "supportedVersions": ["2026-07-28"], "capabilities": capabilities,
                "ttlMs": 0, "cacheScope": "private"}
    if method == "subscriptions/listen" and MODERN:
        number, wanted = request["id"], params["notifications"]
        meta = {"io.modelcontextprotocol/subscriptionId": number}
        client.send({"method": "notifications/subscriptions/acknowledged",
                     "params": {"_meta": meta, "notifications": wanted}})
        listeners.append((client, number))
        note("listening", json.dumps(wanted))
        threading.Event().wait()
    if method == "tools/list":
        return {"tools": tools(client)}
    if method == "resources/list":
        own = [{"uri": f"note://{client.user}", "name": f"diary of {client.user}"}] if client.user else []
        return {"resources": [{"uri": "note://1", "name": "first note"}, *own]}
    if method == "resources/templates/list":
        return {"resourceTemplates": []}
    if method == "resources/read":
        return {"contents": [{"uri": params["uri"], "text": "the note"}]}
    if method == "prompts/list":
        own = [{"name": f"letter_of_{client.user}"}] if client.user else []
        return {"prompts": [{"name": "greet", "arguments": [{"name": "who", "required": True}]}, *own]}
    if method == "prompts/get":
        return {"messages": [{"role": "user", "content": {"type": "text", "text": f"Greet {params['arguments']['who']}."}}]}
    if method == "tools/call":
        if params["name"] == "research":
            return start_task(params)
        return call(client, request, params["name"], params.get("arguments") or {})
    if method == "tasks/get":
        return tasks[params["taskId"]]
    if method == "tasks/result":
        return text(f"result of task {params['taskId']}")
    if method == "tasks/cancel":
        tasks[params["taskId"]]["status"] = "cancelled"
        note("task cancelled")
        return tasks[params["taskId"]]
    if method == "ping":
        return {}
    raise LookupError(method)


def reply(client, request):
    try:
        client.send({"id": request["id"], "result": answer(client, request)})
    except LookupError as error:
        client.send({"id": request["id"], "error": {"code": -32601, "message": f"unknown: {error}"}})


class Client:
    """One stream to the client."""

    def __init__(self, write, user=None):
        self.write, self.lock, self.user = write, threading.Lock(), user

    def send(self, message):
        with self.lock:
            self.write(json.dumps({"jsonrpc": "2.0", **message}))

    def ask(self, method, params):
        number = f"server-{len(waiting)}"
        waiting[number] = (threading.Event(), [])
        self.send({"id": number, "method": method, "params": params})
        waiting[number][0].wait()
        return waiting[number][1][0]


def receive(message):
    """Handles what is not a request."""
    if message.get("method") == "notifications/cancelled":
        cancelled.add(message["params"]["requestId"])
    elif "method" not in message:
        event, answers = waiting[message["id"]]
        answers.append(message)
        event.set()


def stdio():
    def write(line):
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
    client = Client(write)
    for line in sys.stdin:
        message = json.loads(line)
        if "method" in message and "id" in message:
            threading.Thread(target=reply, args=(client, message), daemon=True).start()
        else:
            receive(message)


def http():
    import base64, hashlib, itertools
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
    from urllib.parse import parse_qsl, urlencode, urlsplit
    codes, scopes, sessions = {}, {}, set()     # scopes by token
    numbers = itertools.count()

    def asked_to(name):
        """Whether the test has asked for something, once."""
        try:
            os.remove(os.path.join(NOTES, name))
            return True
        except FileNotFoundError:
            return False

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *arguments):
            pass

        def answer(self, status, body=b"", **headers):
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def document(self, content, status=200):
            self.answer(status, json.dumps(content).encode(), content_type="application/json")

        def do_GET(self):
            base, address = f"http://127.0.0.1:{server.server_address[1]}", urlsplit(self.path)
            if address.path == "/.well-known/oauth-protected-resource/mcp":
                return self.document({"resource": f"{base}/mcp", "authorization_servers": [base]})
            if address.path == "/.well-known/oauth-authorization-server":
                return self.document({"issuer": base, "authorization_endpoint": f"{base}/authorize",
                                      "token_endpoint": f"{base}/token", "registration_endpoint": f"{base}/register"})
            if address.path == "/authorize":
                asked = dict(parse_qsl(address.query))
                code = f"code-{next(numbers)}"
                codes[code] = asked["code_challenge"], asked.get("scope", "")
                note("authorized", f"{asked['client_id']} {asked['resource']} {asked.get('scope', '')}".rstrip())
                query = urlencode({"code": code, "state": asked["state"]})
                return self.answer(302, location=f"{asked['redirect_uri']}?{query}")
            self.answer(405)

        def sign_in(self, body):
            if self.path == "/register":
                return self.document({"client_id": "registered", "redirect_uris": json.loads(body)["redirect_uris"]})
            asked = dict(parse_qsl(body.decode()))
            digest = hashlib.sha256(asked["code_verifier"].encode()).digest()
            challenge, scope = codes.pop(asked["code"], (None, ""))
            if base64.urlsafe_b64encode(digest).decode().rstrip("=") != challenge:
                return self.document({"error": "invalid_grant"}, 400)
            token = f"token-{next(numbers)}"
            scopes[token] = scope
            self.document({"access_token": token, "token_type": "Bearer", "expires_in": 3600})

        def refusal(self, message):
            """Returns the status and the challenge of a request without a token that permits it."""
            if asked_to("refuse tokens"):
                scopes.clear()
            scope = scopes.get(self.headers.get("authorization", "")[7:])
            where = f"resource_metadata=\"http://127.0.0.1:{server.server_address[1]}/.well-known/oauth-protected-resource/mcp\""
            if os.environ.get("MCP_OAUTH") and scope is None:
                return 401, f"Bearer {where}"
            if message.get("method") == "tools/call" and message["params"]["name"] == "secret":
                if scope is None:
                    return 401, f"Bearer scope=\"read\", {where}"
                if "write" not in scope.split():
                    return 403, f"Bearer error=\"insufficient_scope\", scope=\"write\", {where}"
            wanted = os.environ.get("MCP_BEARER")
            if wanted and self.headers.get("authorization") != f"Bearer {wanted}":
                return 401, ""

        def do_DELETE(self):
            self.answer(200)

        def do_POST(self):
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.path in ("/register", "/token"):
                return self.sign_in(body)
            message = json.loads(body)
            if refusal := self.refusal(message):
                return self.answer(refusal[0], www_authenticate=refusal[1])
            if asked_to("forget sessions"):
                sessions.clear()
            begins = message.get("method") == "initialize"
            if not MODERN and not begins and self.headers.get("mcp-session-id") not in sessions:
                note("unknown session")
                error = {"code": -32000, "message": "Bad Request: No valid session ID provided"}
                return self.document({"jsonrpc": "2.0", "id": None, "error": error},
                                     int(os.environ.get("MCP_UNKNOWN_SESSION", "404")))
            if begins and MODERN:
                error = {"code": -32601, "message": "there is no handshake"}
                return self.document({"jsonrpc": "2.0", "id": message["id"], "error": error}, 400)
            if "method" not in message or "id" not in message:
                receive(message)
                return self.answer(202)
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            if begins:
                session = f"session-{os.getpid()}-{next(numbers)}"
                sessions.add(session)
                self.send_header("mcp-session-id", session)
            self.send_header("connection", "close")
            self.end_headers()

            def write(line):
                self.wfile.write(f"data: {line}\n\n".encode())
                self.wfile.flush()
            # With MCP_USERS each token has lists of its own.
            token = self.headers.get("authorization", "")[7:]
            user = token.replace("-", "_") if os.environ.get("MCP_USERS") else None
            reply(Client(write, user), message)
            self.close_connection = True

    server = ThreadingHTTPServer(("127.0.0.1", int(os.environ.get("MCP_PORT", "0"))), Handler)
    print(server.server_address[1], flush=True)
    server.serve_forever()


http() if sys.argv[1:] == ["http"] else stdio()
