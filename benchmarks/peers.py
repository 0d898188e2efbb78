"""Other projects on a converted model, each asked once: transformers serve, accelerate launch, trl, peft, lm-eval.

    python benchmarks/peers.py [--moe OUT] [--only trl,peft] [--attention per_token] [--task-folder FOLDER --task NAME]

Without --moe it carves a pico model of its own. All but the server load the folder as a stranger would, with
trust_remote_code and without the package tomoe in the process. Prints a table: peer, version, outcome. `transformers serve`
needs the extra `transformers[serving]`.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import urllib.request
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SENTENCES = [f"The boat number {i} went over the sea while rain fell on the hills." for i in range(16)]
# Seconds in which a server must answer.
PATIENCE = 300.0
ARGUMENTS = dict(
    max_steps=2, per_device_train_batch_size=2, learning_rate=1e-3, logging_steps=1, report_to=[], use_cpu=True, bf16=False,
    save_strategy="no", disable_tqdm=True, seed=0, dataloader_pin_memory=False, max_length=32, dataset_num_proc=None,
)  # fmt: skip
SERVE = """
import transformers
from transformers.cli.transformers import main
from tomoe.moe.modeling_tomoe import ToMoEForCausalLM
transformers.ToMoEForCausalLM = ToMoEForCausalLM
main()
"""
QUESTIONS = """task: five_questions
dataset_path: json
dataset_kwargs:
  data_files:
    validation: {file}
output_type: multiple_choice
validation_split: validation
test_split: null
doc_to_text: "{{{{question}}}}"
doc_to_choice: [" sea", " town"]
doc_to_target: answer
metric_list:
  - metric: acc
"""


def load(moe: Path) -> tuple[Any, Any]:
    """The model in float32 and its tokenizer, as from a stranger's folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(moe, trust_remote_code=True, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(moe)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return model, tokenizer


def ask_trl(moe: Path, folder: Path, args: argparse.Namespace) -> str:
    """SFTTrainer: two steps with the balance loss, save, load again."""
    import torch

    # Without types.
    trl, datasets = import_module("trl"), import_module("datasets")
    model, tokenizer = load(moe)
    model.config.output_router_logits = True
    rows = datasets.Dataset.from_dict({"text": SENTENCES})
    config = trl.SFTConfig(output_dir=str(folder / "trl"), **ARGUMENTS)
    trainer = trl.SFTTrainer(model, args=config, train_dataset=rows, processing_class=tokenizer)
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    trainer.save_model(str(folder / "trained"))
    again, ids = load(folder / "trained")[0].eval(), torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        assert torch.equal(again(ids).logits, trainer.model.eval()(ids).logits), (
            "saved and loaded, it computes something else"
        )
    return f"SFTTrainer, 2 steps, losses {losses[0]:.3f}, {losses[1]:.3f}; saved, loaded: same logits"


def ask_peft(moe: Path, folder: Path, args: argparse.Namespace) -> str:
    """LoRA beside the attention and the experts' rows: two steps, save the adapter, load it on the folder."""
    import peft
    import torch

    model, tokenizer = load(moe)
    config = peft.LoraConfig(
        r=4,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        target_parameters=["mlp.up_proj", "mlp.down_proj"],
        task_type="CAUSAL_LM",
    )
    adapted = peft.get_peft_model(model, config)
    batch = tokenizer(SENTENCES[:4], return_tensors="pt", padding=True)
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(2):
        loss = adapted(**batch, labels=batch["input_ids"]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    adapted.save_pretrained(str(folder / "adapter"))
    dense, _ = load(moe)
    again = peft.PeftModel.from_pretrained(dense, str(folder / "adapter")).eval()
    with torch.no_grad():
        before, after = (m.eval()(**batch).logits for m in (adapted, again))
        assert torch.equal(before, after), "the adapter that was saved computes something else"
        merged = again.merge_and_unload()(**batch).logits
    torch.testing.assert_close(merged, after, atol=1e-3, rtol=1e-3)
    return f"LoRA on attention and experts, 2 steps, losses {losses[0]:.3f}, {losses[1]:.3f}; saved, loaded, merged: same logits"


def ask_lm_eval(moe: Path, folder: Path, args: argparse.Namespace) -> str:
    """The command line `lm_eval` on five questions."""
    tasks, task = args.task_folder, args.task
    if tasks is None:
        tasks, task = folder / "tasks", "five_questions"
        tasks.mkdir()
        rows = [{"question": f"Boat {i} went over the", "answer": 0} for i in range(5)]
        (tasks / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (tasks / "task.yaml").write_text(QUESTIONS.format(file=tasks / "rows.jsonl"))
    model_args = f"pretrained={moe},trust_remote_code=True,dtype=float32"
    command = [
        "-m",
        "lm_eval",
        "--model",
        "hf",
        "--model_args",
        model_args,
        "--tasks",
        task,
        "--include_path",
        str(tasks),
    ]
    options = ["--limit", "5", "--device", "cpu", "--batch_size", "1", "--output_path", str(folder / "scores")]
    completed(sys.executable, *command, *options)
    scores = json.loads(next((folder / "scores").rglob("results*.json")).read_text())
    return f"5 questions of {task}: accuracy {scores['results'][task]['acc,none']:.1f}"


def ask_accelerate(moe: Path, folder: Path, args: argparse.Namespace) -> str:
    """`accelerate launch` of `train` below, on one process and on two."""
    outcomes = []
    for processes in (1, 2):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        kept = "--num_machines 1 --mixed_precision no --dynamo_backend no --num_cpu_threads_per_process 1".split()
        # With --cpu it starts one process, whatever the number; the script itself asks for CPUs.
        many = [
            "--num_processes",
            str(processes),
            "--main_process_port",
            port,
            "--cpu" if processes == 1 else "--multi_gpu",
        ]
        launch = [sys.executable, "-m", "accelerate.commands.launch", *kept, *many]
        printed = completed(*launch, __file__, "--worker", "--moe", str(moe))
        outcomes.append(next(line for line in printed.splitlines() if line.startswith("losses")))
    return "; ".join(outcomes)


def train(moe: Path) -> None:
    """Two steps of an ordinary training script, in each process of `accelerate launch`."""
    import torch
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, tokenizer = load(moe)
    model.config.output_router_logits = True
    ids = tokenizer(SENTENCES, return_tensors="pt", padding=True)["input_ids"][:, :32]
    # Both runs see four sentences a step.
    loader = torch.utils.data.DataLoader(ids, batch_size=4 // accelerator.num_processes)
    trained, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-2), loader)
    losses: list[float] = []
    for batch in loader:
        if len(losses) == 2:
            break
        loss = trained(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(accelerator.gather(loss.detach()[None]).mean()))
    sums = accelerator.gather(torch.stack([p.detach().double().sum() for p in model.parameters()]).sum()[None])
    assert bool((sums == sums[0]).all()), "the processes hold different weights"
    accelerator.print(f"losses {losses[0]:.4f}, {losses[1]:.4f} with {accelerator.num_processes} process(es)")


def ask_serve(moe: Path, folder: Path, args: argparse.Namespace) -> str:
    """`transformers serve OUT`, asked for a completion and for a chat over its port.

    The server looks for the class that a config names in the package transformers alone, so code that comes with a folder
    is never found, from whatever folder: the class of the package tomoe is put there before the server starts.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", SERVE, "serve", str(moe)]
    log = folder / "serve.log"
    with log.open("w") as out:
        server = subprocess.Popen(
            [*command, "--device", "cpu", "--dtype", "float32", "--port", str(port)],
            stdout=out,
            stderr=out,
            env=environment(),
        )
    try:
        wait_for(port, server, log)
        done = []
        url = f"http://127.0.0.1:{port}/v1"
        given = {"model": str(moe), "max_tokens": 8, "stream": False, "temperature": 0}
        text = post(f"{url}/completions", given | {"prompt": "The sea"})["choices"][0]["text"]
        done.append(f"/v1/completions: {text!r}"[:60])
        if '"chat_template"' in (moe / "tokenizer_config.json").read_text() or (moe / "chat_template.jinja").is_file():
            chat = [{"role": "user", "content": "Name a sea."}]
            answer = post(f"{url}/chat/completions", given | {"messages": chat})["choices"][0]["message"]["content"]
            done.append(f"/v1/chat/completions: {answer!r}"[:60])
        return "; ".join(done)
    finally:
        server.terminate()
        server.wait(30)


def wait_for(port: int, server: subprocess.Popen[bytes], log: Path) -> None:
    """Raises RuntimeError with the end of the log if the server ends or does not listen in time."""
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until and server.poll() is None:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).read()
            return
        except OSError:
            time.sleep(1)
    raise RuntimeError("no answer: " + " ".join(log.read_text()[-600:].split()))


def post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    return json.loads(urllib.request.urlopen(request, timeout=PATIENCE).read())


def environment() -> dict[str, str]:
    return os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def completed(*command: str) -> str:
    """What a command printed. Raises RuntimeError with the end of it for any exit code but 0."""
    done = subprocess.run(command, env=environment(), text=True, capture_output=True, timeout=900, check=False)
    if done.returncode:
        raise RuntimeError(" ".join((done.stdout + done.stderr)[-600:].split()))
    return done.stdout


PEERS: dict[str, Callable[[Path, Path, argparse.Namespace], str]] = {
    "trl": ask_trl, "peft": ask_peft, "lm_eval": ask_lm_eval, "accelerate": ask_accelerate, "transformers serve": ask_serve,
}  # fmt: skip


def carve(folder: Path, attention: str) -> Path:
    """A pico model, converted by the command line."""
    sys.path.insert(0, str(ROOT / "tests"))
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from pico_files import carved; from pathlib import Path; "
        "carved(Path(sys.argv[2]), '--active', '0.6', '--set', 'attention.pruning=' + sys.argv[3])"
    )
    (folder / "pico").mkdir()
    completed(sys.executable, "-c", code, str(ROOT / "tests"), str(folder / "pico"), attention)
    return folder / "pico" / "moe"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moe", type=Path)
    parser.add_argument("--only", default=",".join(PEERS))
    parser.add_argument("--attention", default="per_token", help="of the pico model: off, static or per_token")
    parser.add_argument("--task-folder", type=Path, help="tasks of lm-eval; without it, five questions made here")
    parser.add_argument("--task", default="")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return train(args.moe)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # Code that comes with a folder is copied to a cache; this one goes with the temporary folder.
        os.environ["HF_MODULES_CACHE"] = str(folder / "modules")
        moe = (args.moe or carve(folder, args.attention)).absolute()
        print("| peer | version | outcome |\n|---|---|---|")
        for peer in args.only.split(","):
            work = folder / peer.replace(" ", "_")
            work.mkdir()
            try:
                outcome = PEERS[peer](moe, work, args)
            except Exception as error:
                traceback.print_exc()
                outcome = f"failed: {type(error).__name__}: {' '.join(str(error).split())[-300:]}"
            print(f"| {peer} | {importlib.metadata.version(peer.split()[0])} | {outcome} |", flush=True)
            shutil.rmtree(work)
    return None


if __name__ == "__main__":
    main()
