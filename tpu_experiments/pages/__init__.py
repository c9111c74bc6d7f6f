"""Pages that need nothing but themselves: jinja2 templates, and the one style sheet that they share."""
