"""An HTML page in one file, from a template of this folder; every value is escaped unless it is `Markup`."""

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined


def page(template: str, **values: Any) -> str:
    """Fill a template.

    Args:
        template: name of a file of this folder, `report.html`.
        values: what it asks for; a name that is missing is an error.
    """
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(values)
