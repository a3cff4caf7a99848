"""Answers HTTP requests with a tensor-parallel model: the first rank reads them, all ranks generate.

    torchrun --nproc-per-node 2 examples/serving/serve.py FOLDER --port 8000
    curl -d '{"prompt": "Once upon a time", "max_new_tokens": 20}' http://127.0.0.1:8000/
    curl -d '{"stop": true}' http://127.0.0.1:8000/

FOLDER has a model and a tokenizer, as transformers writes them. Requests are answered one after the other. Whoever can
reach the port can stop the server, so it listens on this machine only.
"""

from __future__ import annotations

import json
from argparse import ArgumentParser
from collections.abc import Callable
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoTokenizer

import autotp

Answer = Callable[[dict[str, Any]], str]
LARGEST = 1 << 20  # bytes of a request


class Handler(BaseHTTPRequestHandler):
    """Reads a request on the first rank, sends it to all ranks, and writes the reply."""

    timeout = 30  # seconds that a client may be silent while it sends its request

    def do_POST(self) -> None:
        try:
            size = int(self.headers.get("Content-Length", 0))
            request = json.loads(self.rfile.read(min(size, LARGEST)))
            if not isinstance(request, dict):
                raise ValueError("a request is a JSON object")
        except ValueError as error:  # The other ranks hear nothing of it.
            return self.reply(400, {"error": str(error)})
        dist.broadcast_object_list([request], group=self.server.requests)  # type: ignore[attr-defined]
        if request.get("stop"):
            self.server.running = False  # type: ignore[attr-defined]
            return self.reply(200, {"stopped": True})
        self.reply(*outcome(self.server.answer, request))  # type: ignore[attr-defined]

    def reply(self, status: int, content: dict[str, Any]) -> None:
        """Writes a JSON object."""
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Writes nothing for a request."""


def outcome(answer: Answer, request: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Returns the status and the content of a reply. A request that cannot be answered fails alike on all ranks."""
    try:
        return 200, {"text": answer(request)}
    except Exception as error:
        return 400, {"error": f"{type(error).__name__}: {error}"}


def serve(answer: Answer, port: int, ready: Callable[[int], None]) -> None:
    """Answers requests until one asks to stop. Call it on every rank.

    Args:
        answer: what every rank computes for a request.
        port: where the first rank listens; 0 means any free port.
        ready: called on the first rank with the port, once it listens.
    """
    # A group of its own: the other ranks may wait for a request for days.
    requests = dist.new_group(backend="gloo", timeout=timedelta(days=365))
    if dist.get_rank() > 0:
        while not (request := received(requests)).get("stop"):
            outcome(answer, request)
        return
    with HTTPServer(("127.0.0.1", port), Handler) as server:
        server.answer, server.requests, server.running = answer, requests, True  # type: ignore[attr-defined]
        ready(server.server_port)
        while server.running:  # type: ignore[attr-defined]
            server.handle_request()


def received(requests: dist.ProcessGroup) -> dict[str, Any]:
    """Returns the first rank's next request."""
    box: list[Any] = [None]
    dist.broadcast_object_list(box, group=requests)
    found: dict[str, Any] = box[0]
    return found


def generator(model: Any, tokenizer: Any) -> Answer:
    """Returns the function that continues the prompt of a request."""

    def answer(request: dict[str, Any]) -> str:
        inputs = tokenizer(request["prompt"], return_tensors="pt").to(model.device)
        with torch.no_grad():
            tokens = model.generate(**inputs, max_new_tokens=request.get("max_new_tokens", 20), do_sample=False)
        return str(tokenizer.decode(tokens[0], skip_special_tokens=True))

    return answer


def main() -> None:
    parser = ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", help="a model and a tokenizer of transformers")
    parser.add_argument("--port", type=int, default=8000, help="on this machine")
    args = parser.parse_args()
    model = autotp.from_pretrained(args.folder)  # Each rank reads its part only.
    tokenizer = AutoTokenizer.from_pretrained(args.folder)
    serve(generator(model, tokenizer), args.port, lambda port: print(f"http://127.0.0.1:{port}/", flush=True))


if __name__ == "__main__":
    main()
