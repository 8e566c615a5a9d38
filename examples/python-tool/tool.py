"""A RAP tool server in plain Python: it answers 200, works in a thread, and POSTs the result to the
callback URL. It has no journal: README.md lists what is lost when the process ends."""
import collections, contextlib, hashlib, hmac, json, os, random, re, sys, threading, urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

BODY_BYTES, RUNNING, REMEMBERED, ATTEMPTS = 8 * 1024 * 1024, 64, 10_000, 60
BEARER = os.fsencode(os.environ.get("RAP_TOOL_BEARER", ""))
ID = re.compile(r"[^\x00-\x1f\x7f-\x9f]+")
URL = re.compile(r"https?://([\w.-]+|\[[\da-fA-F:.]+\])(:\d{1,5})?([/?][!-~]*)?", re.ASCII)
IDS = {"/invoke": ["group_id", "id"], "/close_thread": ["thread_id"]}  # required ids
IDS["/cancel_tool_call"] = IDS["/tool_call_status"] = ["thread_id", "tool_call_id"]
lock, running, over = threading.Lock(), {}, collections.deque(maxlen=REMEMBERED)  # over: ended keys
client = urllib.request.OpenerDirector()  # without the handlers for redirects and proxies
client.add_handler(urllib.request.HTTPHandler())
client.add_handler(urllib.request.HTTPSHandler())

# A tool returns its result; a subscription sends a confirmation and events, and returns the last.
def pause(call, arguments):
    """Waits for some seconds."""
    call.stop.wait(arguments["seconds"])
    return f"waited {arguments['seconds']}"

def countdown(call, arguments):
    """Subscribes to a countdown: an event for each number, to 0."""
    call.send(f"Counting down from {arguments['from']}. Subscription ID: {call.id}")
    for number in range(int(arguments["from"]), 0, -1):
        call.stop.wait(arguments["every_seconds"])
        call.send(str(number))  # does nothing once `stop` is set
    call.stop.wait(arguments["every_seconds"])
    return "0"

TOOLS = {  # name: function, and the type and maximum of each argument; the minimum is 0
    "pause": (pause, {"seconds": ("number", 86400)}),
    "countdown": (countdown, {"from": ("integer", 1000), "every_seconds": ("number", 86400)})}
TOOLSET = {"name": "python-tool", "tools": [
    {"name": name, "description": function.__doc__, "inputSchema": {
        "type": "object", "required": list(rules), "properties": {
            key: {"type": kind, "minimum": 0, "maximum": top} for key, (kind, top) in rules.items()
        }}} for name, (function, rules) in TOOLS.items()]}
TOOLSET["version"] = hashlib.sha256(json.dumps(TOOLSET).encode()).hexdigest()[:16]

def defect(operation, arguments):
    if not isinstance(operation, str) or operation not in TOOLS:
        return f"Error: there is no such operation; there are {', '.join(TOOLS)}"
    for name, (kind, top) in TOOLS[operation][1].items():
        got = arguments.get(name) if isinstance(arguments, dict) else None
        if type(got) not in (int, float) or not 0 <= got <= top or kind == "integer" and got % 1:
            return f"Error: argument `{name}` of {operation} has to be of type {kind}, 0 to {top}"

class Call:
    def __init__(self, message):
        self.url, self.thread, self.id = message["callback_url"], message["group_id"], message["id"]
        self.key = hashlib.sha256(json.dumps([self.url, self.thread, self.id]).encode()).digest()
        self.call_id = message["call_id"] if isinstance(message.get("call_id"), str) else None
        self.stop, self.closed, self.sent = threading.Event(), threading.Event(), 0

    def run(self, operation, arguments):
        try:
            text = defect(operation, arguments) or str(TOOLS[operation][0](self, arguments))
        except Exception as error:  # its text may contain secrets
            print(f"{operation} failed: {type(error).__name__}", file=sys.stderr)
            text = "Error: the tool failed; check what was done before you call it again"
        self.send("Error: cancelled" if self.stop.is_set() else text, final=True)
        with lock: over.append(running.pop(self.key).key)

    def send(self, text, final=False):
        if self.sent:
            status = self.deliver(self.stop, type="subscription_event", tool_call_id=self.id,
                                  event_id=str(self.sent), text=text, final=final)
        else:
            result = {"type": "tool_result", "id": self.id, "call_id": self.call_id}
            until = self.closed if final else self.stop
            status = self.deliver(until, **result, text=text, subscription=not final)
            if status in (400, 413):
                self.deliver(until, **result, text=f"Error: the result was refused ({status})")
        if status in (0, 404, 410) or status >= 300 and not self.sent: self.stop.set()
        self.sent += 1 if status else 0

    def deliver(self, until, **message):  # returns the status; 0 if none was below 500
        body = json.dumps({"group_id": self.thread, **message}).encode()
        request = urllib.request.Request(self.url, body, {"Content-Type": "application/json"})
        for attempt in range(ATTEMPTS):  # with pauses of about 0.5, 1, 2, 4 … 60, 60 seconds
            if until.wait(attempt and min(2 ** attempt, 240) * random.uniform(0.2, 0.3)): break
            with contextlib.suppress(Exception), client.open(request, timeout=30) as answer:
                if answer.status < 500: return answer.status
        return 0

class Handler(BaseHTTPRequestHandler):
    timeout = 30  # seconds, for each read

    def do_GET(self):
        self.answer(200, TOOLSET) if self.path == "/.well-known/rap-toolset" else self.answer(404)

    def do_POST(self):
        length = self.headers.get("Content-Length", "")
        length = int(length) if re.fullmatch("[0-9]{1,9}", length) else 0
        body = self.rfile.read(min(length, BODY_BYTES))
        for left in range(length - BODY_BYTES, 0, -65536):  # or the sender may miss the 413
            self.rfile.read(min(left, 65536))
        shown = self.headers.get("Authorization", "").encode("latin-1")
        if BEARER and not hmac.compare_digest(shown[:7].lower() + shown[7:], b"bearer " + BEARER):
            return self.answer(401)
        if self.path not in IDS: return self.answer(404)
        if self.headers.get_content_type() != "application/json": return self.answer(415)
        if length > BODY_BYTES: return self.answer(413)
        try:
            message = json.loads(body)
            ids = [message[name] for name in IDS[self.path]]
            valid = all([ID.fullmatch(id) and len(id.encode()) <= 256 for id in ids])
            sound = self.path != "/invoke" or valid and URL.fullmatch(message["callback_url"])
        except (KeyError, RecursionError, TypeError, ValueError): sound = False
        if not sound: return self.answer(400)
        self.invoke(Call(message), message) if self.path == "/invoke" else self.notice(ids, valid)

    def invoke(self, call, message):
        with lock:
            known = call.key in running or call.key in over
            stale = message.get("toolset_version") not in (None, TOOLSET["version"])
            status = 200 if known else 409 if stale else 503 if len(running) >= RUNNING else 200
            if status == 200 and not known: running[call.key] = call
        self.answer(status)
        if running.get(call.key) is call:
            work = (message.get("operation"), message.get("arguments"))
            threading.Thread(target=call.run, args=work, daemon=True).start()

    def notice(self, ids, valid):
        with lock:
            calls = [c for c in running.values() if valid and ids == [c.thread, c.id][:len(ids)]]
        if self.path == "/tool_call_status": return self.answer(200, {"alive": bool(calls)})
        for call in calls:  # `closed`: send nothing more; `stop`: end the work
            if self.path == "/close_thread": call.closed.set()
            call.stop.set()
        self.answer(200)

    def answer(self, status, content=None):
        body = b"" if content is None else json.dumps(content).encode()
        with contextlib.suppress(OSError):  # a client that has disconnected sends it again
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            if status == 503: self.send_header("Retry-After", "1")
            self.end_headers()
            self.wfile.write(body)

if __name__ == "__main__":
    ThreadingHTTPServer.request_queue_size = 128
    server = ThreadingHTTPServer(("127.0.0.1", int(os.environ.get("PORT", 7503))), Handler)
    TOOLSET["endpoint"] = f"http://127.0.0.1:{server.server_port}/invoke"
    print(f"listening url=http://127.0.0.1:{server.server_port}", file=sys.stderr)
    server.serve_forever()
