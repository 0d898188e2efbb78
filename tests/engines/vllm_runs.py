"""vLLM asked from a test: predictions of folders beside those of transformers, and a server that answers."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed (./run.sh engines)")
# little memory for keys and values, and no thread bound to a core that others may be using
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
# seconds; the engine takes most of a minute to start, and many times that on a machine that is busy
PATIENCE = 3000


@dataclass(frozen=True)
class Predicted:
    """What a model says to one prompt: log-probs of its tokens, of the most likely ones there, and the ids it writes."""

    log_probs: Tensor
    most_likely: Tensor
    written: list[int]


def ask_vllm(requests: list[dict[str, Any]], place: Path) -> list[Any]:
    """Run `vllm_process.predict` for each request; `place` is a folder for what goes to and fro.

    What comes back is a list of Predicted for each, or what vLLM says if it fails at a request that `may_fail`.
    """
    (place / "requests.json").write_text(json.dumps(requests), encoding="utf-8")
    script = Path(__file__).with_name("vllm_process.py")
    ran = subprocess.run(
        [sys.executable, script, place / "requests.json", place / "answers.json"],
        env=os.environ | ENVIRONMENT,
        cwd=place,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert ran.returncode == 0, ran.stderr[-4000:] + ran.stdout[-2000:]
    answers = json.loads((place / "answers.json").read_text("utf-8"))
    return [answer if isinstance(answer, str) else [predicted(a) for a in answer] for answer in answers]


def predicted(answer: dict[str, Any]) -> Predicted:
    """An answer of the process."""
    return Predicted(torch.tensor(answer["log_probs"]), torch.tensor(answer["most_likely"]), answer["written"])


@torch.no_grad()
def ask_transformers(folder: Path, prompts: list[list[int]], new_tokens: int, **changes: Any) -> list[Predicted]:
    """The same from transformers, in float32 and without code of tomoe."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **changes).eval()
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        log_probs = model(ids).logits[0, :-1].log_softmax(-1)
        written = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        own = log_probs.gather(1, ids[0, 1:, None]).squeeze(1)
        answers.append(Predicted(own, log_probs.amax(-1), written[0, len(prompt) :].tolist()))
    return answers


def assert_alike(engine: list[Predicted], reference: list[Predicted], tolerance: float) -> None:
    """The same ids written; log-probs within `tolerance`."""
    for answer, expected in zip(engine, reference, strict=True):
        difference = float((answer.log_probs - expected.log_probs).abs().max())
        assert difference <= tolerance, f"log-probs of the prompt differ by {difference:.2g}"
        assert torch.allclose(answer.most_likely, expected.most_likely, rtol=0, atol=tolerance)
        assert answer.written == expected.written


def assert_routed_alike(engine: list[Predicted], reference: list[Predicted], tolerance: float) -> None:
    """Log-probs within `tolerance` at nine tenths of the positions.

    Both round alike to the last bit only; where fine-grained experts are almost tied, one may choose another than the other.
    """
    pairs = zip(engine, reference, strict=True)
    off = torch.cat([(answer.log_probs - expected.log_probs).abs() for answer, expected in pairs])
    assert float((off <= tolerance).float().mean()) >= 0.9, off


@contextmanager
def serving(folder: Path, log: Path, *options: str) -> Iterator[str]:
    """`vllm serve FOLDER` on a free port, until the block ends; the address of its API."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    vllm = str(Path(sys.executable).with_name("vllm"))
    command = [vllm, "serve", str(folder), "--host", "127.0.0.1", "--port", str(port)]
    with log.open("w") as file:
        server = subprocess.Popen(
            [*command, *options], env=os.environ | ENVIRONMENT, stdout=file, stderr=subprocess.STDOUT
        )
        try:
            wait_for(f"http://127.0.0.1:{port}/health", server, log)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            server.terminate()
            server.wait(60)


def wait_for(address: str, server: subprocess.Popen[bytes], log: Path) -> None:
    """Return once the server answers; fail with its log if it ends, or takes too long."""
    ends = time.monotonic() + PATIENCE
    while time.monotonic() < ends:
        assert server.poll() is None, log.read_text("utf-8")[-4000:]
        try:
            urllib.request.urlopen(address, timeout=5)
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(1)
        else:
            return
    pytest.fail(f"no answer within {PATIENCE} s: {log.read_text('utf-8')[-4000:]}")


def post(address: str, **body: Any) -> dict[str, Any]:
    """The answer to a JSON request."""
    request = urllib.request.Request(address, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        result: dict[str, Any] = json.load(answer)
    return result
