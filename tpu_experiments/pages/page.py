"""Self-contained HTML pages from the templates of this folder; values are escaped unless `Markup`."""

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined


def page(template: str, **values: Any) -> str:
    """Render a template.

    Args:
        template: name of a file of this folder, `report.html`.
        values: the template's variables; a missing one raises jinja2's UndefinedError.
    """
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(values)
