"""What mkdocs does beside its own: pages that are there join the navigation, links out of docs/ become words."""

import re
from pathlib import Path
from typing import Any

USE = ("serve.md", "deploy.md", "scale.md")
"""Pages that stand under "Use it" where they exist."""


def on_config(config: Any) -> Any:
    there = [page for page in USE if (Path(config["docs_dir"]) / page).exists()]
    if there:
        config["nav"].insert(1, {"Use it": there})
    return config


def on_page_markdown(markdown: str, page: Any, **more: Any) -> str:
    """Files of the checkout are not part of the site."""
    depth = page.file.src_uri.count("/")
    inside = re.compile(r"(?<!!)\[([^\]]+)\]\((?:\.\./){" + str(depth + 1) + r",}[^)]*\)")
    return inside.sub(r"\1", markdown)
