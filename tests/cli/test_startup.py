"""What a fresh process imports: the command line no torch, and `import tomoe` what transformers needs to know our models."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = ("torch", "transformers", "matplotlib", "numpy", "jaxtyping", "huggingface_hub")
# runs a command and says what it imported
COMMAND = f"""
import sys
from tomoe.cli import main
try:
    main(sys.argv[1:])
finally:
    print("imported", [name for name in {HEAVY} if name in sys.modules], file=sys.stderr)
"""
CONVERT = ["convert", "nowhere", "-o", "out"]


def fresh(script: str, *args: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", script, *map(str, args)], capture_output=True, text=True)


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["--help"], 0, "Mixture-of-Experts"),
        (["--version"], 0, "tomoe"),
        (["convert", "--help"], 0, "--active"),
        (["convrt"], 2, "convert"),
        ([*CONVERT, "--stepz", "3"], 2, "--steps"),
        (["convert", "nowhere"], 2, "--out"),
        ([*CONVERT, "--set", "train.step=3"], 2, "train.steps"),
        ([*CONVERT, "--set", "train.steps=many"], 2, "train.steps"),
        ([*CONVERT, "--recipe", "dmo"], 2, "demo"),
        ([*CONVERT, "--attention", "none"], 2, "per_token"),
        (["route", "nowhere"], 2, "--file"),
        (["report", "nowhere"], 2, "no converted model"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_no_command_imports_torch_before_its_arguments_are_right(args: list[str], code: int, words: str) -> None:
    done = fresh(COMMAND, *args)
    assert done.returncode == code, done.stderr
    assert words in done.stdout + done.stderr
    assert done.stderr.splitlines()[-1] == "imported []"


def test_importing_tomoe_imports_neither_torch_nor_transformers() -> None:
    script = "import tomoe, sys; from tomoe import UserError; assert not {'torch', 'transformers'} & set(sys.modules)"
    done = fresh(script)
    assert done.returncode == 0, done.stderr


CONFIG = "from transformers import AutoConfig; assert type(AutoConfig.from_pretrained(folder)).__module__ == place"
MODEL = "from transformers import AutoModelForCausalLM as A; assert type(A.from_pretrained(folder)).__module__ == place"
BARE = "from transformers import AutoModel; assert type(AutoModel.from_pretrained(folder)).__name__ == 'ToMoEModel'"
TOKENIZER = "from transformers import AutoTokenizer; assert AutoTokenizer.from_pretrained(folder)('the sea').input_ids"
KERNELS = "from tomoe.moe.modeling_tomoe import EXPERT_BACKENDS; assert 'native' in EXPERT_BACKENDS"
START = "import sys; folder, place = sys.argv[1], 'tomoe.moe.modeling_tomoe'"


@pytest.mark.slow
@pytest.mark.parametrize(
    "lines",
    [
        ["import tomoe", MODEL],
        ["import tomoe", TOKENIZER, BARE],
        ["import transformers", "import tomoe", CONFIG],
        ["from transformers import AutoConfig, AutoModelForCausalLM", "import tomoe", MODEL],
        ["import tomoe", "import transformers.models.auto.auto_factory", MODEL],
        ["import tomoe.moe.kernels", MODEL],
    ],
    ids=lambda lines: "; ".join(line.partition(";")[0] for line in lines),
)
def test_converted_models_need_no_flag(converted: Path, lines: list[str]) -> None:
    done = fresh("\n".join([START, *lines, KERNELS]), converted / "moe")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_public_names() -> None:
    script = "import tomoe\nfor name in tomoe.__all__: print(name, getattr(tomoe, name))"
    done = fresh(script + "\nassert dir(tomoe) == sorted(tomoe.__all__)")
    assert done.returncode == 0, done.stderr
    assert "module" not in done.stdout, "a public name must be no module"
    wrong = fresh("import tomoe; tomoe.fold")
    assert "module 'tomoe' has no attribute 'fold'" in wrong.stderr
