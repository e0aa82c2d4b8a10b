"""Tables for papers and pages: Markdown and LaTeX that need nothing else."""

import re

from fedprotip.report.parts import Grid

LATEX = {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    "±": r"$\pm$", "–": "--", "−": "$-$", "ε": r"$\varepsilon$", "…": r"\dots{}", "“": "``", "”": "''",
    "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}",
    **{letter: f"\\{letter}" for letter in "&%$#_{}"},
}  # fmt: skip


def markdown_text(text: str) -> str:
    """A text of a run, of which no letter is Markdown or HTML.

    >>> markdown_text("a|b *c* <b>")
    'a\\\\|b \\\\*c\\\\* &lt;b>'
    """
    return re.sub(r"([\\`*_\[\]|#])", r"\\\1", text.replace("\n", " ").replace("&", "&amp;").replace("<", "&lt;"))


def latex_text(text: str) -> str:
    """A text of a run as a cell; the end of the row before would take a bracket or a star at its beginning for its own.

    >>> latex_text("lr=0.1_x & 5 %"), latex_text("[mine]")
    ('lr=0.1\\\\_x \\\\& 5 \\\\%', '{}[mine]')
    """
    start = "{}" if text.lstrip().startswith(("[", "*")) else ""
    return start + "".join(LATEX.get(letter, letter) for letter in text.replace("\n", " "))


def markdown_table(grid: Grid) -> str:
    """The best of a column is bold."""
    rows = [
        [f"**{markdown_text(cell)}**" if (r, c) in grid.best else markdown_text(cell) for c, cell in enumerate(row)]
        for r, row in enumerate(grid.rows)
    ]
    lines = [[markdown_text(column) for column in grid.columns], ["---", *["---:"] * (len(grid.columns) - 1)], *rows]
    parts = [f"**{markdown_text(grid.title)}**\n"] if grid.title else []
    parts += [*(f"| {' | '.join(line)} |" for line in lines)]
    return "\n".join(parts) + (f"\n\n{markdown_text(grid.note)}" if grid.note else "") + "\n"


def latex_table(grid: Grid) -> str:
    """A tabular without packages; the best of a column is bold."""
    rows = [
        [f"\\textbf{{{latex_text(cell)}}}" if (r, c) in grid.best else latex_text(cell) for c, cell in enumerate(row)]
        for r, row in enumerate(grid.rows)
    ]
    notes = [f"% {line}" for line in (grid.title, grid.note) if line]
    lines = [
        *notes,
        f"\\begin{{tabular}}{{l{'r' * (len(grid.columns) - 1)}}}",
        "\\hline",
        f"{' & '.join(latex_text(column) for column in grid.columns)} \\\\",
        "\\hline",
        *(f"{' & '.join(row)} \\\\" for row in rows),
        "\\hline",
        "\\end{tabular}",
    ]
    return "\n".join(lines) + "\n"
