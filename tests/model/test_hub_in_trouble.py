"""A hub that is busy, late, breaks off or is gone: huggingface_hub tries again, then one sentence. A server plays the hub."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from pico_files import write_pico

pytestmark = pytest.mark.slow

# One process for all troubles, because importing takes longer than they do. For every line of JSON, [address, cache folder]:
# load the model from there; say what it got or said.
LOADER = """
import json, sys, time
from pathlib import Path
import huggingface_hub.constants as constants
import torch
from tomoe.errors import UserError
from tomoe.model.loading import load_config, load_dense

torch.set_num_threads(1)
time.sleep = lambda seconds: None
constants.HF_HUB_ETAG_TIMEOUT = constants.HF_HUB_DOWNLOAD_TIMEOUT = 3
for line in sys.stdin:
    repository = json.loads(line)
    try:
        load_config(repository)
        said = "%d weights" % load_dense(repository, torch.float32).num_parameters()
    except UserError as error:
        said = "refused: %s" % error
    print(json.dumps(said), flush=True)
"""


class Hub(ThreadingHTTPServer):
    """Serves one folder as every repository. `trouble` of so many requests for files, or for one: 503, late, reset or half."""

    daemon_threads = True

    def __init__(self, folder: Path):
        super().__init__(("127.0.0.1", 0), Answer)
        self.folder, self.trouble, self.left, self.file = folder, "", 0, ""

    def handle_error(self, *_: Any) -> None:
        """A client that gave up waiting is no fault of ours."""


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
        if trouble == "late":
            # until nobody waits for it any more
            self.connection.recv(1, socket.MSG_PEEK)
            self.close_connection = True
            return None
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


@pytest.fixture(scope="module")
def loader(hub: Hub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[str]]:
    own = {
        "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}",
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HOME": str(tmp_path_factory.mktemp("home")),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    with subprocess.Popen(
        [sys.executable, "-c", LOADER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | own,
    ) as process:
        yield process
        process.communicate()


def load(loader: subprocess.Popen[str], repository: str) -> str:
    """The number of weights or the sentence."""
    assert loader.stdin is not None
    assert loader.stdout is not None
    loader.stdin.write(json.dumps(repository) + "\n")
    loader.stdin.flush()
    return str(json.loads(loader.stdout.readline()))


@pytest.mark.parametrize(("trouble", "times"), [("503", 2), ("late", 1), ("half", 2)])
def test_trouble_that_passes(hub: Hub, loader: subprocess.Popen[str], trouble: str, times: int) -> None:
    hub.trouble, hub.left, hub.file = trouble, times, ""
    assert load(loader, f"ada/{trouble}-{times}").endswith(" weights")
    assert hub.left <= 0


@pytest.mark.parametrize(
    ("trouble", "file"), [("503", ""), ("reset", ""), ("half", ""), ("reset", "model.safetensors")]
)
def test_trouble_that_stays(hub: Hub, loader: subprocess.Popen[str], trouble: str, file: str) -> None:
    hub.trouble, hub.left, hub.file = trouble, 10**6, file
    repository = f"ada/{trouble}-{len(file)}"
    sentence = load(loader, repository)
    hub.left = 0
    part = "model" if file else "config"
    assert sentence.startswith(f"refused: cannot load the {part} {repository} from the hub: ")
    assert "\n" not in sentence
    assert sentence.endswith("smollm2-135m needs no hub")
    if trouble != "503":
        assert "the hub is out of reach (" in sentence


def test_a_hub_that_is_gone(hub: Hub, loader: subprocess.Popen[str]) -> None:
    """Last: nobody listens any more."""
    hub.shutdown()
    hub.server_close()
    assert "the hub is out of reach (ConnectError" in load(loader, "ada/gone")
