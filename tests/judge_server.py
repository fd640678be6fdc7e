"""A chat server over real HTTP that marks answers, and misbehaves as it is told."""

import contextlib
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class JudgeServer:
    """Answers each request by `verdict(text of the last message)`, unless `fault(request number, text)` names one of
    garbage, hang, status_503, refuse, nonsense. `up` can be cleared: it then answers 503 to all."""

    def __init__(self, verdict, fault=lambda number, text: ""):
        self.verdict, self.fault = verdict, fault
        self.up, self.release = threading.Event(), threading.Event()
        self.up.set()
        self.asked, self.lock = [], threading.Lock()
        self.running, self.most = 0, 0
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                outer.answer(self, body)

            def log_message(self, *_):
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 256

            def handle_error(self, *_):
                pass  # clients that gave up

        self.server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/v1"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self.thread.start()

    def answer(self, handler, body):
        text = body["messages"][-1]["content"]
        with self.lock:
            self.asked.append(body)
            number = len(self.asked) - 1
        what = self.fault(number, text) if self.up.is_set() else "status_503"
        if what == "hang":
            self.release.wait(60)
            handler.close_connection = True
            return
        if what == "refuse":
            handler.close_connection = True
            return
        if what.startswith("status_"):
            self._send(handler, int(what.removeprefix("status_")), b"busy")
            return
        said = "I cannot say {" if what == "nonsense" else self.verdict(text)
        reply = {
            "choices": [{"message": {"content": said}, "finish_reason": "stop"}],
            "usage": {"completion_tokens": 3},
        }
        self._send(handler, 200, b"<html>" if what == "garbage" else json.dumps(reply).encode())

    @staticmethod
    def _send(handler, status, data):
        handler.send_response(status)
        handler.send_header("content-length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)

    def close(self):
        self.release.set()
        self.server.shutdown()
        self.server.server_close()


@contextlib.contextmanager
def judge_server(verdict, fault=lambda number, text: ""):
    server = JudgeServer(verdict, fault)
    try:
        yield server
    finally:
        server.close()


def share(text, salt=""):
    """Return a number from 0 to 1 that depends only on a text."""
    return int(hashlib.sha256(f"{salt}{text}".encode()).hexdigest()[:8], 16) / 16**8
