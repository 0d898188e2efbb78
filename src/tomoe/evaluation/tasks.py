"""Zero- and few-shot tasks through lm-eval (the extra `eval`), for a dense model and an MoE by the same code."""

from __future__ import annotations

import contextlib
import difflib
import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tomoe.errors import UserError

SEED = 1234  # lm-eval's own, of the choice of examples shown
BATCH = 8
BOOTSTRAPS = 1000  # for metrics other than means, whose standard error has no formula

Progress = Callable[[str, int, int], None]
"""Called as (task, questions answered, questions in all)."""


@dataclass(frozen=True)
class TaskSpec:
    """A task as it is asked for, by lm-eval's name."""

    name: str
    shots: int | None = None  # examples shown; None: what the task says, or none
    metric: str | None = None  # the one that tables show; None: acc_norm where the task has it, else its first


@dataclass(frozen=True)
class TaskScore:
    """What one model reached in one task. Shares, not per cent."""

    task: str
    shots: int
    metric: str
    value: float
    standard_error: float | None
    examples: int
    truncated: int  # requests that did not fit the model's context and lost their beginning
    metrics: dict[str, float]  # all that the task reports
    version: str  # of the task, as lm-eval counts it
    harness: str  # lm-eval and its version
    seed: int = SEED

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TaskScore:
        return cls(**values)


SUITES = {
    # the five of the paper's tables on pruned models, with their metrics
    "paper": tuple(
        TaskSpec(name, 0, metric)
        for name, metric in (
            ("arc_easy", "acc_norm"),
            ("arc_challenge", "acc_norm"),
            ("piqa", "acc_norm"),
            ("winogrande", "acc"),
            ("hellaswag", "acc_norm"),
        )
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
    """`piqa,boolq:32` -> two tasks, the second with 32 examples. Raises UserError for what is no such list."""
    specs = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, colon, shots = part.partition(":")
        if not name or (colon and not shots.isdecimal()):
            raise UserError(f"{part!r} is no task; write its name, or name:examples, for example boolq:32")
        specs.append(TaskSpec(name, int(shots) if colon else None))
    if not specs:
        raise UserError("no task is named; give some, for example piqa,arc_easy, or a suite: " + ", ".join(SUITES))
    return tuple(specs)


class TaskSet:
    """Tasks with their questions, ready to be put to one model after another."""

    def __init__(
        self,
        specs: Sequence[TaskSpec],
        folder: Path | None = None,
        *,
        limit: int | None = None,
        batch_size: int = BATCH,
    ):
        """Load task files and data. `limit` bounds the questions of a task (each one, in a group).

        Task files of `folder` come before lm-eval's own of the same name; where it has all that is asked for, no other is
        looked at. They may name Python functions, which then run. Raises UserError: lm-eval is not installed, no such
        task, no such folder, data out of reach.
        """
        if folder is not None and not folder.is_dir():
            raise UserError(f"there is no folder {folder} to read task files from")
        lm_eval = _lm_eval()
        self.limit, self.batch_size, self.evaluate = limit, batch_size, lm_eval.evaluate
        manager = _manager(lm_eval, [spec.name for spec in specs], folder)
        self.tasks = [(spec, _load(manager, spec)) for spec in specs]
        self.harness = f"lm-eval {lm_eval.__version__}"

    def run(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, progress: Progress | None = None
    ) -> tuple[TaskScore, ...]:
        """Put every task to one model; the same questions, in the same order, with the same examples each time."""
        return tuple(self._run(spec, loaded, model, tokenizer, progress) for spec, loaded in self.tasks)

    def _run(
        self,
        spec: TaskSpec,
        loaded: dict[str, Any],
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        progress: Progress | None,
    ) -> TaskScore:
        for task in loaded["tasks"].values():
            task.set_fewshot_seed(seed=SEED)  # anew, or the next model sees other examples
        with _quiet():
            lm = _wrapped(model, tokenizer, self.batch_size, lambda at, of: progress and progress(spec.name, at, of))
            found = self.evaluate(
                lm=lm, task_dict=loaded, limit=self.limit, bootstrap_iters=BOOTSTRAPS, log_samples=False
            )
        return _score(spec, loaded, found, lm.truncated, self.harness)


def _lm_eval() -> Any:
    try:
        import_module("lm_eval.models.huggingface")  # here: it takes seconds, and is an extra
        import_module("lm_eval.tasks")
        return import_module("lm_eval")
    except ImportError as error:
        raise UserError(f"tasks need lm-eval ({error}); install it with: pip install 'tomoe-llm[eval]'") from error


def _manager(lm_eval: Any, names: Sequence[str], folder: Path | None) -> Any:
    """All task files by name; reading the thousands of lm-eval's own takes seconds, so only where they are needed."""
    if folder is not None:
        own = lm_eval.tasks.TaskManager(include_path=str(folder), include_defaults=False)
        if set(names) <= set(own.all_tasks):
            return own
    with _quiet():
        manager = lm_eval.tasks.TaskManager(include_path=None if folder is None else str(folder))
    for name in names:
        if name not in manager.all_tasks:
            near = difflib.get_close_matches(name, manager.all_tasks, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            where = "" if folder is None else f" and {folder}"
            raise UserError(f"lm-eval{where} knows no task {name!r}{hint}")
    return manager


def _load(manager: Any, spec: TaskSpec) -> dict[str, Any]:
    import datasets  # type: ignore[import-untyped]

    try:
        with _quiet():
            loaded: dict[str, Any] = manager.load([spec.name])
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        reason = str(error).strip().split("\n")[0].split(". ")[0].rstrip(".")
        raise UserError(
            f"cannot load the task {spec.name}: {reason}; task files that read local data can be given with --task-dir"
        ) from None
    for task in loaded["tasks"].values():
        if getattr(task, "UNSAFE_CODE", False):
            raise UserError(f"the task {spec.name} runs code that the model writes, which is not done here")
        own = task.get_config("num_fewshot")
        # a task that says 0 has its examples in its prompt already; lm-eval leaves that alone too
        asked = own if spec.shots is None or own == 0 else spec.shots
        task.set_config(key="num_fewshot", value=asked or 0)
    return loaded


def _wrapped(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, batch_size: int, told: Callable[[int, int], Any]
) -> Any:
    """lm-eval's own wrapper around a model that is loaded already, with two counters."""
    wrapper: Any = import_module("lm_eval.models.huggingface").HFLM

    class Counting(wrapper):
        truncated, done, total = 0, 0, 0

        def add_partial(self, *_: Any) -> None:
            """lm-eval calls this with every answer, for its cache."""
            self.done += 1
            told(self.done, self.total)

        def _loglikelihood_tokens(self, requests: Any, *args: Any, **more: Any) -> Any:
            self.total += len(requests)
            longest = max(len(asked) for _, _, asked in requests)
            if longest > self.max_length:
                raise UserError(f"an answer has {longest} tokens, but the model takes no more than {self.max_length}")
            self.truncated += sum(len(given) + len(asked) > self.max_length + 1 for _, given, asked in requests)
            return super()._loglikelihood_tokens(requests, *args, **more)

        def generate_until(self, requests: Any, *args: Any, **more: Any) -> Any:
            self.total += len(requests)
            return super().generate_until(requests, *args, **more)

    lm = Counting(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
    lm.set_cache_hook(lm)
    return lm


def _score(spec: TaskSpec, loaded: dict[str, Any], found: dict[str, Any], truncated: int, harness: str) -> TaskScore:
    name = spec.name if spec.name in found["results"] else next(iter(found["results"]))
    results = {key.removesuffix(",none"): value for key, value in found["results"][name].items() if "," in key}
    metrics = {key: float(value) for key, value in results.items() if "_stderr" not in key}
    wanted = spec.metric or ("acc_norm" if "acc_norm" in metrics else next(iter(metrics)))
    if wanted not in metrics:
        raise UserError(f"the task {spec.name} reports no {wanted}, but {', '.join(metrics)}")
    error = results.get(f"{wanted}_stderr")
    tasks = loaded["tasks"]
    return TaskScore(
        task=spec.name,
        shots=max(int(task.get_config("num_fewshot")) for task in tasks.values()),
        metric=wanted,
        value=metrics[wanted],
        standard_error=error if isinstance(error, float) else None,  # "N/A" where lm-eval knows none
        examples=sum(found["n-samples"][each]["effective"] for each in tasks),
        truncated=truncated,
        metrics=metrics,
        version=str(found["versions"].get(name, "")),
        harness=harness,
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Without lm-eval's bars and advice; progress has a place of its own."""
    with contextlib.redirect_stderr(io.StringIO()):
        yield
