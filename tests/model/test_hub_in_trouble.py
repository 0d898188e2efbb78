"""A hub that is busy, breaks off or is gone: huggingface_hub tries again, then one sentence. A server plays the hub."""

from __future__ import annotations

import hashlib
import json
import socket
import struct
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from huggingface_hub import constants

from pico_files import write_pico
from tomoe.errors import UserError
from tomoe.model.loading import load_config, load_dense

pytestmark = pytest.mark.slow


class Hub(ThreadingHTTPServer):
    """Serves one folder as every repository. `trouble` of so many requests for files, or for one: 503, reset or half."""

    daemon_threads = True

    def __init__(self, folder: Path):
        super().__init__(("127.0.0.1", 0), Answer)
        self.folder, self.trouble, self.left, self.file = folder, "", 0, ""


class Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        name = self.path.partition("/resolve/")[2].partition("/")[2]
        meant = bool(name) and self.server.file in ("", name)
        troubled = meant and self.server.left > 0 and (body or self.server.trouble != "half")
        self.server.left -= troubled
        trouble = self.server.trouble if troubled else ""
        if trouble == "503":
            return self.send(503, b"", body)
        if trouble == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
            self.close_connection = True
            return None
        if not name:
            return self.send(200, json.dumps({"id": "ada/pico", "sha": "a" * 40, "siblings": []}).encode(), body)
        file = self.server.folder / name
        if not file.is_file():
            return self.send(404, b"", body, {"x-error-code": "EntryNotFound"})
        return self.send(200, file.read_bytes(), body, half=trouble == "half")

    def send(
        self, status: int, data: bytes, body: bool, more: dict[str, str] | None = None, half: bool = False
    ) -> None:
        self.send_response(status)
        headers = {"etag": f'"{hashlib.sha1(data).hexdigest()}"', "x-repo-commit": "a" * 40} | (more or {})
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        if body:
            self.wfile.write(data[: len(data) // 2] if half else data)
        if half:
            self.close_connection = True


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    served = Hub(write_pico(tmp_path_factory.mktemp("hub") / "dense"))
    Thread(target=served.serve_forever, daemon=True).start()
    yield served
    served.shutdown()
    served.server_close()


@pytest.fixture(autouse=True)
def client(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client of this process asks the server, and does not wait between two tries."""
    address = f"http://127.0.0.1:{hub.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    template = address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", address)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)


def load(repository: str) -> str:
    """The number of weights or the sentence."""
    try:
        load_config(repository)
        return f"{load_dense(repository, torch.float32).num_parameters()} weights"
    except UserError as error:
        return f"refused: {error}"


@pytest.mark.parametrize("trouble", ["503", "half"])
def test_trouble_that_passes(hub: Hub, trouble: str) -> None:
    hub.trouble, hub.left, hub.file = trouble, 2, ""
    assert load(f"ada/{trouble}").endswith(" weights")
    assert hub.left <= 0


@pytest.mark.parametrize(
    ("trouble", "file"), [("503", ""), ("reset", ""), ("half", ""), ("reset", "model.safetensors")]
)
def test_trouble_that_stays(hub: Hub, trouble: str, file: str) -> None:
    hub.trouble, hub.left, hub.file = trouble, 10**6, file
    repository = f"ada/{trouble}-{len(file)}"
    sentence = load(repository)
    hub.left = 0
    part = "model" if file else "config"
    assert sentence.startswith(f"refused: cannot load the {part} {repository} from the hub: ")
    assert "\n" not in sentence
    assert sentence.endswith("smollm2-135m needs no hub")
    if trouble != "503":
        assert "the hub cannot be reached (" in sentence


def test_a_hub_that_is_gone(hub: Hub) -> None:
    """Last: nobody listens any more."""
    hub.shutdown()
    hub.server_close()
    assert "the hub cannot be reached (ConnectError" in load("ada/gone")
