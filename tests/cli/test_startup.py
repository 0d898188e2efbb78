"""What a fresh process imports: the command line no torch, and `import tomoe` what transformers needs to know our models."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from pico_files import Outcome

HEAVY = ("torch", "transformers", "matplotlib", "numpy", "jaxtyping", "huggingface_hub")
# `python -m tomoe`, which says what it imported
COMMAND = f"""
import runpy, sys
try:
    runpy.run_module("tomoe", run_name="__main__")
finally:
    print("imported", [name for name in {HEAVY} if name in sys.modules], file=sys.stderr)
"""
CONVERT = ["convert", "nowhere", "-o", "out"]
# Runs each script in a fork of its own, which has imported what the script names and those before it name.
FORKS = """
import json, os, sys, traceback
for out, script, args, imported in json.loads(sys.argv[1]):
    for name in imported:
        __import__(name)
    if os.fork():
        with open(out + ".code", "w") as file:
            file.write(str(os.waitstatus_to_exitcode(os.wait()[1])))
        continue
    for stream in (1, 2):
        os.dup2(os.open(f"{out}.{stream}", os.O_WRONLY | os.O_CREAT), stream)
    sys.argv[1:], code = args, 0
    try:
        exec(script, {"__name__": "script"})
    except SystemExit as left:
        code = left.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
"""


def fresh(folder: Path, scripts: list[tuple[str, list[str], list[str]]]) -> list[Outcome]:
    """Run scripts with their arguments, each in a process that has imported nothing but what it and those before it name."""
    jobs = [(str(folder / str(i)), *script) for i, script in enumerate(scripts)]
    subprocess.run([sys.executable, "-c", FORKS, json.dumps(jobs)], check=True)
    left = [[Path(f"{out}.{end}").read_text("utf-8") for end in ("code", "1", "2")] for out, *_ in jobs]
    return [Outcome(int(code), out, err) for code, out, err in left]


WORDS = [
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
]


def test_no_command_imports_torch_before_its_arguments_are_right(tmp_path: Path) -> None:
    # what these import, a command would have imported, too
    found = fresh(tmp_path, [(COMMAND, args, ["tomoe.cli", "tomoe.recipe.conversion"]) for args, _, _ in WORDS])
    for done, (args, code, words) in zip(found, WORDS, strict=True):
        assert done.code == code, (args, done.err)
        assert words in done.out + done.err
        assert done.err.splitlines()[-1] == "imported []", args


SETTINGS = """
import os, sys
from tomoe import __main__
from tomoe.cli import main
# the command is not run
sys.modules["tomoe.cli"].main = lambda: print({name: os.environ.get(name) for name in ("OMP_WAIT_POLICY", *__main__.SPINS)})
for name in ("OMP_WAIT_POLICY", *__main__.SPINS):
    os.environ.pop(name, None)
os.environ.update(pair.split("=") for pair in sys.argv[1:])
assert "torch" not in sys.modules
__main__.main()
"""


def test_threads_spin_briefly_unless_the_user_says_how_they_wait(tmp_path: Path) -> None:
    given = [[], ["OMP_WAIT_POLICY=ACTIVE"], ["GOMP_SPINCOUNT=7"]]
    default, active, counted = (eval(done.out) for done in fresh(tmp_path, [(SETTINGS, args, []) for args in given]))
    assert default == {"OMP_WAIT_POLICY": None, "GOMP_SPINCOUNT": "1000", "KMP_BLOCKTIME": "1"}
    assert active == {"OMP_WAIT_POLICY": "ACTIVE", "GOMP_SPINCOUNT": None, "KMP_BLOCKTIME": None}
    assert counted == {"OMP_WAIT_POLICY": None, "GOMP_SPINCOUNT": "7", "KMP_BLOCKTIME": None}


def test_importing_tomoe_imports_neither_torch_nor_transformers(tmp_path: Path) -> None:
    script = "import tomoe, sys; from tomoe import UserError; assert not {'torch', 'transformers'} & set(sys.modules)"
    (done,) = fresh(tmp_path, [(script, [], [])])
    assert done.code == 0, done.err


CONFIG = "from transformers import AutoConfig; assert type(AutoConfig.from_pretrained(folder)).__module__ == place"
MODEL = "from transformers import AutoModelForCausalLM as A; assert type(A.from_pretrained(folder)).__module__ == place"
BARE = "from transformers import AutoModel; assert type(AutoModel.from_pretrained(folder)).__name__ == 'ToMoEModel'"
TOKENIZER = "from transformers import AutoTokenizer; assert AutoTokenizer.from_pretrained(folder)('the sea').input_ids"
KERNELS = "from tomoe.moe.modeling_tomoe import BACKENDS; assert 'native' in BACKENDS['experts']"
START = "import sys; folder, place = sys.argv[1], 'tomoe.moe.modeling_tomoe'"
NAMES = """
import tomoe
for name in tomoe.__all__:
    print(name, getattr(tomoe, name))
assert dir(tomoe) == sorted(tomoe.__all__)
try:
    tomoe.carve
except AttributeError as error:
    assert str(error) == "module 'tomoe' has no attribute 'carve'"
else:
    raise AssertionError("carve is not public")
"""
# what all need and none is about
SHARED = """torch._dynamo torch.distributed.tensor torch.distributed.checkpoint.hf_storage scipy.optimize accelerate
huggingface_hub.hf_api huggingface_hub.file_download jinja2.sandbox PIL.Image regex tokenizers""".split()
AUTO = ["transformers.models.auto.modeling_auto", "transformers.models.llama.modeling_llama"]
# the lines of scripts, and what is imported before them
ORDERS = [
    (["import tomoe", MODEL], SHARED),
    (["import tomoe.moe.kernels", MODEL], []),
    (["import tomoe", TOKENIZER, BARE], ["transformers"]),
    (["import tomoe", CONFIG], []),
    (["import tomoe", MODEL, NAMES], AUTO),
]


# as where tomoe is not installed; alone, transformers' AutoTokenizer loads the model's config first, and would ask for its code
BEFORE = """
import os, sys
folder, os.environ["HF_MODULES_CACHE"] = sys.argv[1:]
os.chdir(folder)
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
sys.modules["tomoe"] = None
from transformers import AutoTokenizer as A; A.from_pretrained("moe", trust_remote_code=False)
"""
AFTER = """
ids = tokenizer("the sea", return_tensors="pt")
print(*ids.input_ids.tolist(), model(**ids).logits.shape, type(model).__module__)
"""


@pytest.mark.slow
def test_converted_models_need_no_flag_and_public_names_are_no_modules(converted: Path, tmp_path: Path) -> None:
    """In whatever order tomoe and transformers are imported; and the card's lines run without tomoe, nobody being asked."""
    jobs = [("\n".join([START, *lines, KERNELS]), [str(converted / "moe")], before) for lines, before in ORDERS]
    card = (converted / "moe" / "README.md").read_text("utf-8")
    (shown,) = [block for block in re.findall(r"```python\n(.*?)```", card, re.DOTALL) if "import tomoe" not in block]
    jobs.append((BEFORE + shown + AFTER, [str(converted), str(tmp_path / "modules")], []))
    found = fresh(tmp_path, jobs)
    for done, (script, *_) in zip(found, jobs, strict=True):
        assert done.code == 0, (script, done.err)
    *_, names, without = found
    assert "Recipe" in names.out
    assert "module" not in names.out, "a public name must be no module"
    ids = AutoTokenizer.from_pretrained(converted / "dense")("the sea").input_ids
    assert AutoTokenizer.from_pretrained(converted / "moe")("the sea").input_ids == ids
    assert without.out.startswith(f"{ids} torch.Size"), without.out
    assert without.out.split()[-1].startswith("transformers_modules.")
    assert "run the custom code" not in without.out + without.err
