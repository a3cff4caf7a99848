"""The server of examples/serving/serve.py on two ranks: its answers are those of one device, and no request ends it."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from ranks import run_ranks

import autotp

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

import transformers
from hugging_face import write_llama
from serving import serve

GOOD = {"prompt": "a dog sees", "max_new_tokens": 5}
BAD: tuple[tuple[Any, str], ...] = (
    ("no JSON", "Expecting value"),
    ([1], "a request is a JSON object"),
    ({}, "KeyError: 'prompt'"),
    ({**GOOD, "max_new_tokens": -1}, "ValueError: "),
    ({"prompt": "a " * 100}, ""),
)


def sent(port: int, request: Any) -> tuple[int, dict[str, Any]]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", "/", request if isinstance(request, str) else json.dumps(request))
    response = connection.getresponse()
    return response.status, json.loads(response.read())


def halted(port: int) -> bytes:
    """What a client gets that sends half a request and waits."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
        client.sendall(b"POST / HTTP/1.0\r\nContent-Length: 99\r\n\r\n{")
        return client.recv(1)


def served(rank: int, n: int, folder: str) -> list[tuple[int, dict[str, Any]]]:
    """The replies to half a request, and to a good one before and after each bad one."""
    found: list[tuple[int, dict[str, Any]]] = []

    def ask(port: int) -> None:
        try:
            found.append((len(halted(port)), {}))
            found.extend(sent(port, request) for bad, _ in BAD for request in (GOOD, bad, GOOD))
        finally:
            found.append(sent(port, {"stop": True}))

    client: list[threading.Thread] = []

    def ready(port: int) -> None:
        client.append(threading.Thread(target=ask, args=(port,)))
        client[0].start()

    serve.Handler.timeout = 1
    model = autotp.from_pretrained(folder, tp=n)
    serve.serve(serve.generator(model, transformers.AutoTokenizer.from_pretrained(folder)), 0, ready)
    for thread in client:
        thread.join(60)
    return found


def test_two_ranks_answer_as_one_device(tmp_path: Path) -> None:
    write_llama(tmp_path)
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    text = serve.generator(model, transformers.AutoTokenizer.from_pretrained(tmp_path))(GOOD)
    first, second = run_ranks(served, 2, str(tmp_path), timeout=110)
    assert second == [] and first[-1] == (200, {"stopped": True})
    assert text.startswith("a dog sees ") and len(text.split()) > 5
    assert first.pop(0) == (0, {}), "the connection is closed without a reply"
    for i, (_, told) in enumerate(BAD):
        before, bad, after = first[3 * i : 3 * i + 3]
        assert before == after == (200, {"text": text})
        assert (bad[0], told in bad[1]["error"]) == (400, True) if told else bad[0] in (200, 400)
