"""The Reactive Agent Protocol for a tool server: it answers 200 at once, works in a thread, and POSTs what comes of
it to the callback URL. Each call has one thread, so its messages are sent in order.

What always holds: a call runs once and has one result, or none when its thread is closed; nothing follows a final
event, a cancellation or a closing; a callback URL is never printed. All of it holds as long as the process lives:
TR-18, SE-10, LC-13 and LC-14 of the protocol ask for more, and are not met.
"""
import hashlib, hmac, http.client, json, os, random, sys, threading, time, unicodedata
from collections import OrderedDict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

BODY_BYTES, RUNNING, REMEMBERED = 8 * 1024 * 1024, 64, 10_000  # of a request; calls at work; calls that are over
FIRST_PAUSE, LONGEST_PAUSE, PATIENCE = 0.5, 60, 3600  # seconds, where a callback has to be sent again
BEARER = os.fsencode(os.environ.get("RAP_TOOL_BEARER", ""))
manifest, functions = {"tools": []}, {}  # what is offered; each function with its parameters
lock, running, over = threading.Lock(), {}, OrderedDict()  # calls by key: those at work, and those that are over


class Refused(Exception):
    """A sentence on what to do: for the model, or, behind a status, for the sender of a request."""


def tool(description, parameters):
    """Offers a function as a tool. All parameters are required."""
    def offer(function):
        name, schema = function.__name__, {"type": "object", "properties": parameters, "required": list(parameters)}
        manifest["tools"].append({"name": name, "description": description, "inputSchema": schema})
        functions[name] = (function, parameters)
        return function
    return offer


def perform(call, operation, arguments):
    if not isinstance(operation, str) or operation not in functions:
        raise Refused(f"there is no such operation; there are {', '.join(functions)}")
    function, parameters = functions[operation]
    if not isinstance(arguments, dict):
        raise Refused(f"the arguments of {operation} have to be an object")
    for name, rule in parameters.items():
        if not fits(arguments.get(name), rule):
            raise Refused(f"the argument `{name}` of {operation} has to fit {json.dumps(rule)}")
    text = function(call, arguments)
    return text if text is None else str(text)


def fits(value, rule):
    kind = {"string": str, "number": (int, float), "integer": int}[rule["type"]]
    if isinstance(value, bool) or not isinstance(value, kind):
        return False
    return rule.get("minimum", value) <= value <= rule.get("maximum", value)


class Call:
    def __init__(self, callback_url, thread, id, call_id):
        self.url, self.thread, self.id = callback_url, thread, id
        self.key = hashlib.sha256(json.dumps([callback_url, thread, id]).encode()).digest()
        self.echo = {"call_id": call_id} if is_id(call_id) else {}
        self.stopped = threading.Event()  # cancelled, or the thread closed: stop working
        self.closed = threading.Event()  # the thread closed: send nothing any more
        self.state, self.events = "running", 0  # then "ended", or "subscribed" in between

    def run(self, operation, arguments):
        try:
            text = perform(self, operation, arguments)
        except Refused as refused:
            text = f"Error: {refused}"
        except Exception as error:  # its text may be nobody's business
            log(f"a tool failed: {type(error).__name__}")
            text = "Error: the tool failed; check what was done before you call it again"
        if self.state == "subscribed":
            self.event(text or "the subscription has ended", final=True)
        elif self.state == "running":  # from here on a cancellation comes too late
            text = "Error: the tool ended without a result" if text is None else text
            self.result("Error: cancelled" if self.stopped.is_set() else text, until=self.closed)
        settle(self)

    def confirm(self, text):
        """Makes the call a subscription; says whether events may follow."""
        status = self.result(text, until=self.stopped, subscription=True)
        if status is not None:
            self.state = "subscribed" if 200 <= status < 300 else "ended"
        return self.state == "subscribed"

    def event(self, text, final=False):
        """Sends one; says whether more may follow. By 404 or 410 a runtime ends a subscription."""
        if self.state != "subscribed":
            return False
        self.events += 1
        event = {"type": "subscription_event", "tool_call_id": self.id, "text": text, "final": final}
        status = self.deliver({**event, "event_id": str(self.events)}, until=self.stopped)
        if final or status in (404, 410):
            self.state = "ended"
        return self.state == "subscribed"

    def result(self, text, until, **more):
        result = {"type": "tool_result", "id": self.id, "text": text, **self.echo}
        status = self.deliver({**result, **more}, until)
        if status in (400, 413):
            self.deliver({**result, "text": f"Error: the result was refused ({status})"}, until=self.closed)
        return status

    def deliver(self, message, until):
        """Sends until there is an answer below 500, and returns it; None when stopped or out of patience."""
        pause, deadline = FIRST_PAUSE, time.monotonic() + PATIENCE
        while not until.is_set() and time.monotonic() < deadline:
            status = post(self.url, json.dumps({"group_id": self.thread, **message}))
            if status is not None and status < 500:
                return status
            until.wait(pause * random.uniform(0.75, 1.25))
            pause = min(2 * pause, LONGEST_PAUSE)


def post(url, body):
    """The status of the answer; None without one. http.client follows no redirect and uses no proxy."""
    parts = urlsplit(url)
    kind, port = (http.client.HTTPSConnection, 443) if parts.scheme == "https" else (http.client.HTTPConnection, 80)
    connection = kind(parts.hostname, parts.port or port, timeout=30)
    try:
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        connection.request("POST", target, body, {"Content-Type": "application/json"})
        return connection.getresponse().status
    except (OSError, http.client.HTTPException, ValueError):
        return None
    finally:
        connection.close()


def accept(call, version):
    """Says whether the call is new. A repeat is recognised before anything else."""
    with lock:
        if call.key in running or call.key in over:
            return False
        if isinstance(version, str) and version != manifest["version"]:
            raise Refused(409, "the toolset has changed; fetch it again")
        if len(running) >= RUNNING:
            raise Refused(503, "too many calls at once; try again later")
        running[call.key] = call
        return True


def settle(call):
    with lock:
        del running[call.key]
        over[call.key] = True
        if len(over) > REMEMBERED:
            over.popitem(last=False)


def find(thread, id=None):
    with lock:
        return [call for call in running.values() if call.thread == thread and id in (None, call.id)]


def is_id(text):
    within = isinstance(text, str) and 1 <= len(text.encode()) <= 256
    return within and not any(unicodedata.category(character) == "Cc" for character in text)


def is_callback_url(text):
    if not isinstance(text, str) or len(text) > 8192 or not all("!" <= character <= "~" for character in text):
        return False
    try:
        parts = urlsplit(text)
        readable = parts.hostname and parts.port != 0 and "@" not in parts.netloc
        return readable and parts.scheme in ("http", "https")
    except ValueError:
        return False


class Handler(BaseHTTPRequestHandler):
    timeout = 30  # seconds, for each read
    ids = {"/close_thread": ["thread_id"], "/cancel_tool_call": ["thread_id", "tool_call_id"],
           "/tool_call_status": ["thread_id", "tool_call_id"]}

    def do_GET(self):
        found = self.path == "/.well-known/rap-toolset"
        self.answer(200 if found else 404, manifest if found else None)

    def do_POST(self):
        self.unread = 0
        try:
            self.authenticate()
            message = self.read()
            self.invoke(message) if self.path == "/invoke" else self.notice(message)
        except Refused as refused:
            self.answer(refused.args[0], {"error": refused.args[1]})
            while self.unread > 0 and self.rfile.read(min(self.unread, 65536)):  # or the answer would be cut off
                self.unread -= 65536

    def authenticate(self):
        scheme, _, token = self.headers.get("Authorization", "").partition(" ")
        if BEARER and not (scheme.lower() == "bearer" and hmac.compare_digest(token.encode("latin-1"), BEARER)):
            raise Refused(401, "send `Authorization: Bearer TOKEN`")
        # A web page can point a name of its own to this machine, and the browser here would call us for it.
        if not BEARER and self.headers.get("Host", "").split(":")[0] not in ("127.0.0.1", "localhost"):
            raise Refused(421, "without RAP_TOOL_BEARER only this machine may call")

    def read(self):
        length = self.headers.get("Content-Length", "0")
        if not length.isdecimal() or len(length) > 15 or "Transfer-Encoding" in self.headers:
            raise Refused(411, "send a Content-Length")
        self.unread = min(int(length), 8 * BODY_BYTES)
        if self.headers.get_content_type() != "application/json":
            raise Refused(415, "send JSON, with `Content-Type: application/json`")
        if int(length) > BODY_BYTES:
            raise Refused(413, f"a body has at most {BODY_BYTES} bytes")
        body, self.unread = self.rfile.read(int(length)), 0
        try:
            message = json.loads(body.decode())
            json.dumps(message, ensure_ascii=False, allow_nan=False).encode()  # loads takes more than JSON
        except (ValueError, RecursionError):
            raise Refused(400, "the body is not JSON in UTF-8") from None
        if not isinstance(message, dict):
            raise Refused(400, "the body is not a JSON object")
        return message

    def invoke(self, message):
        url, thread, id = (message.get(name) for name in ("callback_url", "group_id", "id"))
        if not (is_callback_url(url) and is_id(thread) and is_id(id)):
            raise Refused(400, "an invocation has a callback_url (http or https), a group_id and an id")
        call = Call(url, thread, id, message.get("call_id"))
        is_new = accept(call, message.get("toolset_version"))
        try:
            self.answer(200)
        finally:  # also when the runtime has hung up: what it sends again is a repeat
            if is_new:
                work = [message.get("operation"), message.get("arguments")]
                threading.Thread(target=call.run, args=work, daemon=True).start()

    def notice(self, message):
        if self.path not in self.ids:
            raise Refused(404, "there is nothing here")
        ids = [message.get(name) for name in self.ids[self.path]]
        if not all(isinstance(id, str) for id in ids):
            raise Refused(400, f"send {' and '.join(self.ids[self.path])}, as strings")
        calls = find(*ids) if all(is_id(id) for id in ids) else []
        if self.path == "/tool_call_status":
            return self.answer(200, {"alive": bool(calls)})
        for call in calls:
            if self.path == "/close_thread":
                call.closed.set()
            call.stopped.set()
        log(f"{self.path} stops {len(calls)} calls")
        self.answer(200)

    def answer(self, status, content=None):
        body = b"" if content is None else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if status == 503:
            self.send_header("Retry-After", "1")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        """Not every request is worth a line."""


def log(line):
    print(line, file=sys.stderr)


def serve(name, port):
    """Serves until the process is ended. The environment may say `PORT`, `RAP_TOOL_BEARER` and `RAP_TOOL_URL`."""
    ThreadingHTTPServer.request_queue_size = 128
    server = ThreadingHTTPServer(("127.0.0.1", int(os.environ.get("PORT") or port)), Handler)
    url = f"http://127.0.0.1:{server.server_port}"
    version = hashlib.sha256(json.dumps(manifest["tools"]).encode()).hexdigest()[:16]
    manifest.update(name=name, endpoint=f"{os.environ.get('RAP_TOOL_URL') or url}/invoke", version=version)
    log(f"listening url={url}")
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        log("stopped")
