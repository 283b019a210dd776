"""Stands in for the xllamacpp wheel in the child process: same names, no model. ``FAKE_LLAMA`` chooses what it does."""

import ctypes
import http.server
import json
import os
import signal
import sys
import threading
from types import SimpleNamespace

MODE = os.environ.get("FAKE_LLAMA", "serve")


class CommonParams(SimpleNamespace):
    def __init__(self):
        super().__init__(model=SimpleNamespace(), cpuparams=SimpleNamespace(), cpuparams_batch=SimpleNamespace())


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({"status": "ok", "pid": os.getpid()}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


class Server:
    def __init__(self, params):
        os.write(1, b"native code prints to stdout whenever it likes\n")
        sys.stderr.write("E load_model: what llama.cpp says while it loads\n")
        if MODE == "fail":
            raise RuntimeError("Failed to init server, please check the input params.")
        if MODE in ("SIGILL", "SIGABRT"):
            signal.signal(getattr(signal, MODE), signal.SIG_DFL)
            os.kill(os.getpid(), getattr(signal, MODE))
        if MODE == "hang":  # holds the GIL, as the real one does while it loads
            ctypes.PyDLL(None).pause()
        self.params = params
        httpd = http.server.ThreadingHTTPServer((params.hostnames[0], params.port), Handler)
        threading.Thread(target=httpd.serve_forever, daemon=True).start()
        self.listening_address = f"http://127.0.0.1:{httpd.server_port}"
