"""Tasks, run by the same code for dense models and MoEs: zero- and few-shot ones through lm-eval (the extra `eval`), and
generative ones (evaluation/writing), which need no other package."""

from __future__ import annotations

import contextlib
import difflib
import io
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tomoe.errors import Advice, UserError
from tomoe.evaluation.results import TaskScore
from tomoe.evaluation.writing import run as writing
from tomoe.progress import ProgressCallback, StageCallback, no_progress, stage_callback
from tomoe.version import install_extra

SEED = 1234  # lm-eval's own, of the choice of few-shot examples
BATCH = 8
BOOTSTRAPS = 1000  # for metrics other than means, whose standard error has no formula


@dataclass(frozen=True)
class TaskSpec:
    """A task, by lm-eval's name."""

    name: str
    shots: int | None = None  # few-shot examples; None: what the task says, or none
    metric: str | None = None  # the one that tables show; None: acc_norm if the task has it, else its first


SUITES = {
    # the five of the paper's tables on pruned models, with their metrics
    "paper": (
        TaskSpec("arc_easy", 0, "acc_norm"),
        TaskSpec("arc_challenge", 0, "acc_norm"),
        TaskSpec("piqa", 0, "acc_norm"),
        TaskSpec("winogrande", 0, "acc"),
        TaskSpec("hellaswag", 0, "acc_norm"),
    ),
    # those of its tables on MoEs: LLaMA-MoE, CMoE and LLaMA-MoE-v2 report them so
    "moe": (
        TaskSpec("boolq", 32, "acc"),
        TaskSpec("sciq", 0, "acc"),
        TaskSpec("piqa", 0, "acc"),
        TaskSpec("winogrande", 5, "acc"),
        TaskSpec("arc_challenge", 25, "acc_norm"),
        TaskSpec("hellaswag", 10, "acc_norm"),
        TaskSpec("mmlu", 5, "acc"),
        TaskSpec("truthfulqa_mc2", 0, "acc"),
    ),
}


def parse_tasks(text: str) -> tuple[TaskSpec, ...]:
    """Parse `piqa,boolq:32` to two tasks, the second with 32 examples. Raises UserError for anything else."""
    specs = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, colon, shots = part.partition(":")
        if not name or (colon and not shots.isdecimal()):
            raise UserError(f"{part!r} is not a task; write its name, or name:examples, for example boolq:32")
        specs.append(TaskSpec(name, int(shots) if colon else None))
    if not specs:
        raise UserError("no task is named; give some, for example piqa,arc_easy, or a suite: " + ", ".join(SUITES))
    return tuple(specs)


class TaskSet:
    """Tasks with their questions, loaded once and run on one model after another."""

    def __init__(
        self,
        specs: Sequence[TaskSpec],
        folder: Path | None = None,
        *,
        limit: int | None = None,
        batch_size: int = BATCH,
        run_code: bool = False,
    ):
        """Load task files and data; `limit` bounds the questions of a task. Task files of `folder` come before lm-eval's own
        (they may name Python functions, which then run), and problems in FOLDER/humaneval/*.jsonl before those of the
        hub; programs that a model writes run only with `run_code`. Raises UserError if lm-eval is needed
        and not installed, or a task, the folder or the data are not found."""
        if folder is not None and not folder.is_dir():
            raise UserError(f"there is no folder {folder} to read task files from")
        self.limit = limit
        self.batch_size = batch_size
        self.tasks: list[tuple[TaskSpec, Any]] = [
            (spec, writing.load_task(spec.name, folder, limit, run_code) if _is_written(spec) else None)
            for spec in specs
        ]
        others = {spec.name for spec, loaded in self.tasks if loaded is None}
        if not others:
            return
        try:
            # here: they take seconds, and are an extra
            import_module("lm_eval.models.huggingface")
            import_module("lm_eval.tasks")
            self.lm_eval: Any = import_module("lm_eval")
        except ImportError as error:
            raise UserError(f"the task {min(others)} needs lm-eval ({error}); {install_extra('eval')}") from error
        with contextlib.redirect_stderr(io.StringIO()):
            manager = self._manager(others, folder)
            self.tasks = [(spec, loaded or _load(manager, spec)) for spec, loaded in self.tasks]

    def _manager(self, names: set[str], folder: Path | None) -> Any:
        """Index the task files; lm-eval's own thousands take seconds, so only if `folder` does not have all `names`."""
        own = str(folder) if folder else None
        manager = self.lm_eval.tasks.TaskManager(include_path=own, include_defaults=folder is None)
        if folder is not None and not names <= set(manager.all_tasks):
            manager = self.lm_eval.tasks.TaskManager(include_path=own)
        for name in sorted(names - set(manager.all_tasks)):
            near = difflib.get_close_matches(name, manager.all_tasks, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise UserError(f"lm-eval{f' and {folder}' if folder else ''} knows no task {name!r}{hint}")
        return manager

    def run(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        on_progress: ProgressCallback = no_progress,
    ) -> tuple[TaskScore, ...]:
        """Run every task, with the same questions and examples each time; the stage of `on_progress` is its name. Raises
        UserError if an answer is longer than the model's context or a task does not report its metric."""
        scores: list[TaskScore] = []
        for spec, loaded in self.tasks:
            progress = stage_callback(on_progress, spec.name)
            if _is_written(spec):
                scores.append(loaded.run(model, tokenizer, self.batch_size, progress))
                continue
            for task in loaded["tasks"].values():
                # again, or the next model sees other examples
                task.set_fewshot_seed(seed=SEED)
            # its bars and advice; progress has a callback of its own
            with contextlib.redirect_stderr(io.StringIO()):
                lm = _wrapped(model, tokenizer, self.batch_size, progress)
                results = self.lm_eval.evaluate(
                    lm=lm, task_dict=loaded, limit=self.limit, bootstrap_iters=BOOTSTRAPS, log_samples=False
                )
            harness = f"lm-eval {self.lm_eval.__version__}"
            scores.append(_score(spec, loaded["tasks"], results, lm.truncated, harness))
        return tuple(scores)


def _is_written(spec: TaskSpec) -> bool:
    """Whether this is one of tomoe's own tasks: a number of examples means lm-eval's of the same name."""
    return spec.shots is None and spec.name in writing.NAMES


def _load(manager: Any, spec: TaskSpec) -> dict[str, Any]:
    import datasets  # type: ignore[import-untyped]

    try:
        loaded: dict[str, Any] = manager.load([spec.name])
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        reason = str(error).strip().split("\n")[0].split(". ")[0].rstrip(".")
        raise UserError(
            f"cannot load the task {spec.name}: {reason}",
            Advice("folder", "for task files that read local data", "DIR"),
        ) from None
    for task in loaded["tasks"].values():
        if getattr(task, "UNSAFE_CODE", False):
            raise UserError(
                f"the task {spec.name} executes generated code, which tomoe does not do for tasks of lm-eval"
            )
        default = task.get_config("num_fewshot")
        # a task that says 0 has its examples in its prompt already; lm-eval leaves that alone too
        shots = default if spec.shots is None or default == 0 else spec.shots
        task.set_config(key="num_fewshot", value=shots or 0)
    return loaded


def _wrapped(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, batch_size: int, progress: StageCallback
) -> Any:
    """Return lm-eval's own wrapper of a loaded model, with two counters."""
    wrapper: Any = import_module("lm_eval.models.huggingface").HFLM

    class Counting(wrapper):
        truncated, done, total = 0, 0, 0

        def add_partial(self, *_: Any) -> None:
            """lm-eval calls this with every answer, for its cache."""
            self.done += 1
            progress(self.done, self.total)

        def _loglikelihood_tokens(self, requests: Any, *args: Any, **options: Any) -> Any:
            self.total += len(requests)
            longest = max(len(answer) for _, _, answer in requests)
            if longest > self.max_length:
                raise UserError(f"an answer has {longest} tokens, but the model takes no more than {self.max_length}")
            self.truncated += sum(len(prompt) + len(answer) > self.max_length + 1 for _, prompt, answer in requests)
            return super()._loglikelihood_tokens(requests, *args, **options)

        def generate_until(self, requests: Any, *args: Any, **options: Any) -> Any:
            self.total += len(requests)
            return super().generate_until(requests, *args, **options)

    lm = Counting(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
    lm.set_cache_hook(lm)
    return lm


def _score(spec: TaskSpec, tasks: dict[str, Any], results: dict[str, Any], truncated: int, harness: str) -> TaskScore:
    name = spec.name if spec.name in results["results"] else next(iter(results["results"]))
    values = {key.removesuffix(",none"): value for key, value in results["results"][name].items() if "," in key}
    metrics = {key: float(value) for key, value in values.items() if "_stderr" not in key}
    metric = spec.metric or ("acc_norm" if "acc_norm" in metrics else next(iter(metrics)))
    if metric not in metrics:
        raise UserError(f"the task {spec.name} reports no {metric}, but {', '.join(metrics)}")
    error = values.get(f"{metric}_stderr")
    return TaskScore(
        task=spec.name,
        shots=max(int(task.get_config("num_fewshot")) for task in tasks.values()),
        metric=metric,
        value=metrics[metric],
        standard_error=error if isinstance(error, float) else None,  # "N/A" if lm-eval knows none
        examples=sum(results["n-samples"][task]["effective"] for task in tasks),
        truncated=truncated,
        metrics=metrics,
        version=str(results["versions"].get(name, "")),
        harness=harness,
        seed=SEED,
    )
