"""The drawings of the method live in the package, whose report shows them. The site gets them from there.

Pages link to the files where they are, so that the links work on a code forge too.
"""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

PACKAGE = "src/tomoe/report/templates"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    root = Path(config.config_file_path).parent
    for drawing in sorted((root / PACKAGE).glob("*.svg")):
        files.append(File.generated(config, f"images/{drawing.name}", abs_src_path=str(drawing)))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    return re.sub(rf"\]\(\.\./{PACKAGE}/", "](images/", markdown)
