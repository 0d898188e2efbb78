"""The kernels for GPUs, run by Triton's interpreter on the CPU: what they compute, not how fast.

Triton reads TRITON_INTERPRET when it is first imported, so all of it runs in a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from test_experts import CASES, Case, make_inputs, make_mlp, one_by_one

from tomoe.moe.kernels import grouped, native
from tomoe.moe.modeling_tomoe import EXPERT_BACKENDS

pytest.importorskip("triton")
INSIDE = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INSIDE, reason="runs in the process with the interpreter")
# An activation that the kernels do not know, no token and fine-grained experts go another way; 70 experts take the
# interpreter half a minute.
NAMES = sorted(
    {name for name, case in CASES.items() if not case.top_k}
    - {"an activation of its own", "no token", "more experts than bits"}
)


@pytest.mark.skipif(INSIDE, reason="this is that process")
def test_all_of_it_under_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert f"{len(NAMES) + 4} passed, 1 skipped" in done.stdout


@interpreted
@pytest.mark.parametrize("name", NAMES)
def test_kernels_compute_the_experts(name: str) -> None:
    from tomoe.moe.kernels import gpu

    mlp, (x, expert_ids) = make_mlp(CASES[name]), make_inputs(CASES[name])
    meant, _ = one_by_one(mlp, x, expert_ids)
    kind = native.activation_kind(mlp)
    assert kind is not None
    found = gpu.run(mlp, x, expert_ids, kind)
    torch.testing.assert_close(found.double(), meant, atol=1e-5 * max(1.0, float(meant.abs().max())), rtol=0)


@interpreted
@pytest.mark.parametrize("name", ["plain", "odd sizes", "biases"])
def test_half_precision_rounds_three_times(name: str) -> None:
    """Sums are float32; h and y are rounded: u = 2^-11 each, h before it is summed. (The interpreter has no bfloat16.)"""
    from tomoe.moe.kernels import gpu

    mlp, (x, expert_ids) = make_mlp(CASES[name], torch.float16), make_inputs(CASES[name], torch.float16)
    meant, sizes = one_by_one(mlp, x, expert_ids)
    kind = native.activation_kind(mlp)
    assert kind is not None
    found = gpu.run(mlp, x, expert_ids, kind)
    assert found.dtype == torch.float16
    assert ((found.double() - meant).abs() - 2.0**-11 * (1.5 * sizes + meant.abs()) - 1e-4).max() <= 0


@interpreted
def test_the_backend_takes_the_kernels_where_they_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    from tomoe.moe.kernels import gpu

    mlp, (x, expert_ids) = make_mlp(Case()), make_inputs(Case())
    taken: list[int] = []
    right = gpu.run
    monkeypatch.setattr(gpu, "run", lambda mlp, x, *rest: taken.append(len(x)) or right(mlp, x, *rest))
    run = EXPERT_BACKENDS["triton"]
    meant, _ = one_by_one(mlp, x, expert_ids)
    torch.testing.assert_close(run(mlp, x, expert_ids).double(), meant, atol=1e-4, rtol=0)
    assert taken == [37]
    fine, (x_fine, chosen) = make_mlp(CASES["fine"]), make_inputs(CASES["fine"])
    torch.testing.assert_close(
        run(fine, x_fine, chosen).double(), one_by_one(fine, x_fine, chosen)[0], atol=1e-4, rtol=0
    )
    assert taken == [37]
    mlp.up_proj.requires_grad_()
    assert run(mlp, x, expert_ids).requires_grad
    mlp.requires_grad_(False)
    monkeypatch.setattr(grouped, "find_spec", lambda name: None)
    torch.testing.assert_close(run(mlp, x, expert_ids).double(), meant, atol=1e-4, rtol=0)
    run(mlp.double(), x.double(), expert_ids)
    assert taken == [37]
