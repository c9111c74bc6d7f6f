"""Serve the report of runs that are going on to this machine's browsers; no device, no torch, no TensorBoard.

The page is built again when it is asked for, at most once in `task.seconds`. Pages of the runs themselves come from run
folders, which may be anybody's: a browser gets them as documents without an origin (CSP's `sandbox`), and no other file
is served. A request for another host is refused, so that no site of the web reads them through a name of its own.
"""

import html
import logging
import threading
import time
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import quote, unquote, urlsplit

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.task_schema import ReportTaskConfig
from tpu_experiments.storage import paths
from tpu_experiments.tasks.report.runs import Run

HOST = "127.0.0.1"
OWN_NAMES = ("127.0.0.1", "localhost")
PAGES = ("audit.html", "rollouts.html", "README.md", "plan.md", "run.log")
"""Files of a run that are served."""
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"

log = logging.getLogger(__name__)
Built = tuple[str, Sequence[Run]]
"""The HTML of a report, and its runs."""


class Live:
    """The report, as new as `seconds` ask for; where it cannot be built, the reason."""

    def __init__(self, build: Callable[[], Built], *, seconds: float) -> None:
        self._build, self.seconds = build, seconds
        self._lock = threading.Lock()
        self._built_at, self._page, self._folders = -seconds, "", dict[str, str]()

    def page(self) -> str:
        """Return the page, with a line of links to the runs' own pages."""
        with self._lock:
            if time.monotonic() - self._built_at >= self.seconds:
                try:
                    text, runs = self._build()
                    self._folders = {run.label: run.folder for run in runs}
                    self._page = text.replace("<main>", f"<main>\n{self._links()}", 1)
                except (ConfigError, OSError) as error:
                    self._page = f"<!DOCTYPE html><title>no report yet</title><p>{html.escape(str(error))}</p>"
                self._built_at = time.monotonic()
            return self._page

    def file(self, label: str, name: str) -> bytes | None:
        """Return a file of a run of the page; None where it is none that is served, or is not there."""
        folder = self._folders.get(label)
        if folder is None or name not in PAGES:
            return None
        try:
            return paths.read_bytes(paths.join(folder, name))
        except (OSError, ValueError):
            return None

    def _links(self) -> str:
        found = []
        for label, folder in self._folders.items():
            there = paths.list_names(folder)
            links = (f'<a href="/{quote(label, safe="")}/{name}">{name}</a>' for name in PAGES if name in there)
            found.append(f"<li>{html.escape(label)}: {' '.join(links)}</li>")
        return f"<ul>{''.join(found)}</ul>"


class _Handler(BaseHTTPRequestHandler):
    server: "_Server"
    timeout = 30

    def do_GET(self) -> None:
        """Answer with the report, or a page of a run."""
        try:
            host = urlsplit(f"//{self.headers.get('Host', '')}").hostname
            path = urlsplit(self.path).path
        except ValueError:  # such as `[`, which no address is
            host, path = None, ""
        parts = [unquote(part) for part in path.split("/")[1:]]
        if host not in OWN_NAMES:
            self._send(403, b"this page is for this machine alone\n", "text/plain")
        elif parts == [""]:
            self._send(200, self.server.live.page().encode(), "text/html", refresh=True)
        elif len(parts) == 2 and (content := self.server.live.file(*parts)) is not None:
            self._send(200, content, "text/html" if parts[1].endswith(".html") else "text/plain")
        else:
            self._send(404, b"there is no such page\n", "text/plain")

    def _send(self, code: int, content: bytes, kind: str, *, refresh: bool = False) -> None:
        self.send_response(code)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Content-Security-Policy", POLICY if refresh else f"sandbox allow-scripts; {POLICY}")
        if refresh:
            self.send_header("Refresh", f"{self.server.live.seconds:g}")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Log no request: there is one every few seconds."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, port: int, live: Live) -> None:
        super().__init__((HOST, port), _Handler)
        self.live = live


def server_of(task: ReportTaskConfig, build: Callable[[], Built]) -> ThreadingHTTPServer:
    """Return a server of the live report, which listens already.

    Raises:
        ConfigError: the port is taken.
    """
    try:
        return _Server(task.port, Live(build, seconds=task.seconds))
    except OSError as error:
        raise ConfigError(
            f"task.port={task.port}; nothing can listen there ({error.strerror or error}); name another port, or 0 for "
            "a free one."
        ) from error
