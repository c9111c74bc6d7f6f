"""Self-contained HTML pages: jinja2 templates and their shared style sheet."""
