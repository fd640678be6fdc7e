"""An OpenAI-compatible server whose model is a rule: a function of the conversation. Real HTTP, real sockets."""

import contextlib
import hashlib
import json
import random
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class RuleServer:
    """Answers every chat completion with `rule(messages, rng)`, whose randomness is of the request's seed and text.

    A rule that ends its answer in another way than `stop` gives text and finish reason.

    asked: how often each request came, by its text. fail: `fail(body)` -> an HTTP status instead of an answer, or None.
    """

    def __init__(self, rule, fail=lambda body: None):
        self.asked, self._lock = {}, threading.Lock()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                key = json.dumps(body, sort_keys=True)
                with server._lock:
                    server.asked[key] = server.asked.get(key, 0) + 1
                status = fail(body) or 200
                rng = random.Random(hashlib.sha256(key.encode()).hexdigest())
                said = rule(body["messages"], rng) if status == 200 else ""
                text, finish = (said, "stop") if isinstance(said, str) else said
                message = {"role": "assistant", "content": text}
                reply = {
                    "choices": [{"index": 0, "message": message, "finish_reason": finish}],
                    "usage": {"completion_tokens": len(text.split())},
                }
                self._send(status, reply if status == 200 else {"error": {"message": "by rule"}})

            def do_GET(self):
                self._send(200, {"object": "list", "data": [{"id": "rule", "object": "model"}]})

            def _send(self, status, reply):
                data = json.dumps(reply).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                with contextlib.suppress(OSError):  # the client may have been killed
                    self.wfile.write(data)

            def log_message(self, *args):
                pass

        class Server(ThreadingHTTPServer):
            request_queue_size = 256  # connections that wait to be taken

        self._http = Server(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self._http.server_port}/v1"

    @property
    def num_asked(self):
        return sum(self.asked.values())

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()
