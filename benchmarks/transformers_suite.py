"""transformers' own common model tests on converted models, and on stock Qwen2-MoE as reference.

Downloads the source distribution of the installed version of transformers into FOLDER, takes tests/test_modeling_common.py
out of it and runs it on pico models of five families, with attention whole and pruned per token. What the source
distribution leaves out (tests of exporters and of generation, since 5.x) is replaced by empty classes.

    python benchmarks/transformers_suite.py FOLDER [--models qwen2-moe,llama,llama-pruned] [--only test_name]

Prints a table of counts, then every test that failed, or that was skipped for a converted model but not for the reference.
"""

from __future__ import annotations

import argparse
import collections
import importlib.util
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from xml.etree import ElementTree

import transformers

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "phi")
REFERENCE = "qwen2-moe"
MODELS = (REFERENCE, *(f"{family}{kind}" for family in FAMILIES for kind in ("", "-pruned")))
ROOT = Path(__file__).parents[1]
MISSING = {"exporters/test_export.py": "ExportTesterMixin", "generation/test_utils.py": "GenerationTesterMixin"}
TESTS = '''"""Written by benchmarks/transformers_suite.py."""

import sys
import unittest
from types import SimpleNamespace

import torch

# before conftest, which checks the shapes of whatever is imported after it
import tomoe.moe.fold, tomoe.pruning.extract, tomoe.pruning.mask_network, tomoe.pruning.carving  # noqa: E401

sys.path.insert(0, {tests!r})

from conftest import PICO, make_pico, make_plan
from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM, Qwen2MoeModel
from transformers.models.auto import modeling_auto

from suite.test_modeling_common import GenerationTesterMixin, ModelTesterMixin
from tomoe.moe.fold import fold
from tomoe.moe.modeling_tomoe import ToMoEForCausalLM, ToMoEModel

# the tests look up by name what a class is for
modeling_auto.MODEL_MAPPING_NAMES["tomoe"] = "ToMoEModel"
modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["tomoe"] = "ToMoEForCausalLM"


def sizes_of(make_config):
    sizes = dict(
        batch_size=3, seq_length=7, is_training=True, hidden_size=PICO["hidden_size"], vocab_size=PICO["vocab_size"],
        num_hidden_layers=PICO["num_hidden_layers"], num_attention_heads=make_config().num_attention_heads,
    )

    def inputs():
        ids = torch.randint(3, PICO["vocab_size"], (3, 7))
        return make_config(), dict(input_ids=ids, attention_mask=torch.ones_like(ids))

    return SimpleNamespace(**sizes, get_config=make_config, prepare_config_and_inputs_for_common=inputs)


def converted(name):
    family, _, pruned = name.partition("-")
    # heads of the usual pico size keep no rotary pair of Phi's half, and then no rope changes anything
    dense = make_pico(family, **dict(num_attention_heads=2, num_key_value_heads=2) if family == "phi" else {{}})
    config = fold(dense, make_plan(dense, "per_token" if pruned else "off")).config
    # what was converted has no name or dtype yet that a test could trip over
    config.dtype = None
    return lambda: type(config)(**config.to_dict())


def reference():
    return Qwen2MoeConfig(**PICO, moe_intermediate_size=16, shared_expert_intermediate_size=16, num_experts=4,
                          num_experts_per_tok=2, decoder_sparse_step=1)


class Base(GenerationTesterMixin, ModelTesterMixin):
    def setUp(self):
        self.model_tester = sizes_of(self.make_config)


class Test_{identifier}(Base, unittest.TestCase):
    all_model_classes = (Qwen2MoeModel, Qwen2MoeForCausalLM) if {reference!r} else (ToMoEModel, ToMoEForCausalLM)
    # a token reaches only some of the experts
    test_all_params_have_gradient = False
    make_config = staticmethod(reference if {reference!r} else converted({name!r}))
'''


def prepare(folder: Path) -> None:
    """The tests of the installed transformers in FOLDER/suite, and what they need in FOLDER/site."""
    suite = folder / "suite"
    if suite.is_dir():
        return
    version = transformers.__version__
    pip = [sys.executable, "-m", "pip", "-q"]
    download = ["download", "--no-deps", "--no-build-isolation", "--no-binary", ":all:", f"transformers=={version}"]
    subprocess.run([*pip, *download, "-d", str(folder)], check=True)
    if importlib.util.find_spec("parameterized") is None:
        subprocess.run([*pip, "install", "parameterized", "--no-deps", "--target", str(folder / "site")], check=True)
    suite.mkdir()
    (suite / "__init__.py").touch()
    with tarfile.open(folder / f"transformers-{version}.tar.gz") as archive:
        for member in archive:
            path = Path(member.name)
            if member.isfile() and path.suffix == ".py" and path.parts[1:2] == ("tests",):
                place = suite.joinpath(*path.parts[2:])
                place.parent.mkdir(parents=True, exist_ok=True)
                content = archive.extractfile(member)
                assert content is not None
                place.write_bytes(content.read())
    for name, mixin in MISSING.items():
        if not (suite / name).is_file():
            (suite / name).parent.mkdir(exist_ok=True)
            (suite / name).parent.joinpath("__init__.py").touch()
            (suite / name).write_text(f"class {mixin}:\n    pass\n")


def run(folder: Path, model: str, only: str) -> dict[str, tuple[str, str]]:
    """(passed, failed or skipped, why) of every test."""
    module, report = folder / f"test_{model.replace('-', '_')}.py", folder / f"{model}.xml"
    values = {"tests": str(ROOT / "tests"), "identifier": model.replace("-", "_"), "name": model}
    module.write_text(TESTS.format(**values, reference=model == REFERENCE))
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(folder), str(folder / "site"), *sys.path[1:]])
    options = [
        "-q",
        "-p",
        "no:cacheprovider",
        "--no-header",
        "-W",
        "ignore",
        f"--junitxml={report}",
        "-k",
        f"Test_ and {only}",
    ]
    command = [sys.executable, "-m", "pytest", *options, "-c", "/dev/null", "--rootdir", str(folder), module.name]
    subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL, check=False)
    results = {}
    for case in ElementTree.parse(report).iter("testcase"):
        verdict, why = "passed", ""
        for node in case:
            if node.tag in ("failure", "error", "skipped"):
                verdict = "skipped" if node.tag == "skipped" else "failed"
                why = " ".join((node.get("message") or "").split())[:160]
        results[case.get("name", "")] = verdict, why
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--only", default="test")
    given = parser.parse_args()
    folder = given.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    prepare(folder)
    results = {}
    for model in given.models.split(","):
        results[model] = run(folder, model, given.only)
        counts = collections.Counter(verdict for verdict, _ in results[model].values())
        print(f"| {model} | {counts['passed']} | {counts['failed']} | {counts['skipped']} |", flush=True)
    expected = results.get(REFERENCE, {})
    print(f"\ntransformers {transformers.__version__}; what is not as in {REFERENCE}:")
    lines = collections.defaultdict(list)
    for model, tests in results.items():
        for name, (verdict, why) in tests.items():
            if verdict == "failed" or (verdict == "skipped" and expected.get(name, ("passed",))[0] != "skipped"):
                lines[name, verdict, why].append(model)
    for (name, verdict, why), models in sorted(lines.items()):
        print(f"| {name} | {verdict} | {', '.join(models)} | {why} |")


if __name__ == "__main__":
    main()
