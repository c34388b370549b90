"""Sections as Markdown and as one HTML page that needs no other file."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from importlib import resources

import jinja2
from markupsafe import Markup
from matplotlib.figure import Figure

from eval_jobs.report.sections import Section


def to_markdown(title: str, sections: Sequence[Section], plot_files: Mapping[str, str]) -> str:
    """The report as Markdown; ``plot_files`` are the files of plots by name."""
    blocks = [f"# {title}"]
    for section in sections:
        blocks.append(f"## {section.title}")
        blocks.append(_markdown_table(section))
        if section.note:
            blocks.append(section.note)
        if section.plot is not None and section.plot in plot_files:
            blocks.append(f"![{section.title}]({plot_files[section.plot]})")
    return "\n\n".join(blocks) + "\n"


def _markdown_table(section: Section) -> str:
    lines = [section.header, ["---"] * len(section.header), *section.rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def to_html(title: str, sections: Sequence[Section], figures: Mapping[str, Figure]) -> str:
    """The report as a page with its plots in it."""
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    template = environment.from_string((resources.files("eval_jobs") / "report" / "page.html").read_text("utf-8"))
    plots = {name: Markup(_inline_svg(figure)) for name, figure in figures.items()}
    return template.render(title=title, sections=sections, plots=plots)


def _inline_svg(figure: Figure) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg")
    svg = buffer.getvalue()
    return svg[svg.index("<svg") :]
