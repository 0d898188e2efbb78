"""Upload a plan, a converted model or an export to the hub, with a card."""

from __future__ import annotations

from pathlib import Path

from tomoe.errors import UserError
from tomoe.model.hub import push
from tomoe.plan import read_plan
from tomoe.recipe.conversion import Recipe
from tomoe.report.card import write_card, write_plan_card
from tomoe.report.summary import shown_name


def push_folder(folder: Path, repo: str, private: bool = False) -> tuple[str, list[str]]:
    """Upload a plan or a model (converted or exported), with a card if it has none.

    Returns its address, and the names in its recipe that are paths of this machine. Raises UserError if the folder is
    neither of them, or if the hub refuses it.
    """
    if not (folder / "plan.json").is_file():
        if not (folder / "export.json").is_file():
            raise UserError(
                f"{folder} holds no plan, converted model or export (no plan.json or export.json), so nothing was uploaded; "
                "name a folder written by `tomoe convert`, plan or export"
            )
        return push(folder, repo, private), []
    plan = read_plan(folder)
    if not (folder / "README.md").exists():
        write_card(folder, plan) if (folder / "config.json").exists() else write_plan_card(folder, plan, repo)
    recipe = Recipe(**plan.recipe)
    paths = [name for name in (recipe.model, *recipe.data.sources) if "/" in name]
    return push(folder, repo, private), [path for path in paths if shown_name(path) != path]
