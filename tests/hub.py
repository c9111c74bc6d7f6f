"""A stand-in for the Hugging Face Hub on loopback: one repository's files over the endpoints that its clients ask for.

with HubServer(folder) as hub: subprocess.run(..., env=os.environ | hub.environment(tmp_path))

With a token it takes commits, whose files come into the folder: those that end in .safetensors as Git LFS does it.
"""

import base64
import hashlib
import json
import re
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

REPOSITORY = "org/set"
COMMIT = hashlib.sha1(b"the only commit", usedforsecurity=False).hexdigest()
PIECE_BYTES = 2**20


class HubServer:
    """Serves the files below a folder as the data set, and as the model, `org/set` at one commit."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.read_bytes: Counter[str] = Counter()
        """Bytes of each file that were asked for."""
        self.reads: Counter[str] = Counter()
        """Requests for the content from a file's first byte on."""
        self.requests: list[str] = []
        self.refused_from: int | None = None
        """Contents are refused from this byte of a file on (403)."""
        self.token: str | None = None
        """Token that may write; without one nobody may."""
        self.created: list[dict[str, Any]] = []
        """What was asked for of repositories to be created."""
        self.commits: list[tuple[str, list[str]]] = []
        """Message and files of each commit."""
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)

    @property
    def url(self) -> str:
        """Of the Hub."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def environment(self, home: Path) -> dict[str, str]:
        """Variables that send a client here, with its cache in `home`."""
        return {"HF_ENDPOINT": self.url, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_TELEMETRY": "1"}

    def __enter__(self) -> "HubServer":
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def do_PUT(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def _answer(self) -> None:
        url = urlsplit(self.path)
        self.hub.requests.append(f"{self.command} {self.path}")
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = unquote(url.path)
        if path == "/api/validate-yaml":
            self._json({"errors": [], "warnings": []})
            return
        if self.command == "PUT" or re.search(r"/api/repos/create$|/preupload/|/commit/|/objects/batch$", path):
            self._write(path, body)
            return
        about = re.fullmatch(rf"/api/(?:datasets|models)/{REPOSITORY}(?:/revision/[^/]+)?", path)
        listed = re.fullmatch(rf"/api/(?:datasets|models)/{REPOSITORY}/tree/([^/]+)/?(.*)", path)
        asked = re.fullmatch(rf"/api/(?:datasets|models)/{REPOSITORY}/paths-info/[^/]+", path)
        content = re.fullmatch(rf"/(?:datasets/)?{REPOSITORY}/resolve/([^/]+)/(.+)", path)
        if about:
            self._json({"id": REPOSITORY, "sha": COMMIT, "siblings": [{"rfilename": name} for name in self._names()]})
        elif listed:
            self._json(list(self._below(listed[2], is_recursive="recursive=true" in url.query.lower())))
        elif asked:
            wanted = parse_qs(body.decode()).get("paths") or json.loads(body or b"{}").get("paths", [])
            self._json([self._entry(name) for name in wanted if (self.hub.folder / name).exists()])
        elif content and (self.hub.folder / content[2]).is_file():
            self._file(content[2])
        elif content:
            self._missing("EntryNotFound")
        else:
            self._missing("RepoNotFound")

    def _write(self, path: str, body: bytes) -> None:
        """Answer the requests of a commit. Of large files, the content comes before it, by its hash."""
        large = self.hub.folder.parent / "large_files"
        if self.command == "PUT":  # its address is the permission, as with the Hub's storage
            large.mkdir(exist_ok=True)
            (large / path.rpartition("/")[2]).write_bytes(body)
            self._json({})
        elif self.hub.token is None or self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            self._refused(401, "Invalid credentials in Authorization header")
        elif path == "/api/repos/create":
            self.hub.created.append(json.loads(body))
            self._json({"url": f"{self.hub.url}/{REPOSITORY}"})
        elif REPOSITORY not in path:
            self._missing("RepoNotFound")
        elif "/preupload/" in path:
            names = [file["path"] for file in json.loads(body)["files"]]
            modes = {name: "lfs" if name.endswith(".safetensors") else "regular" for name in names}
            self._json({"files": [{"path": n, "uploadMode": modes[n], "shouldIgnore": False} for n in names]})
        elif path.endswith("/objects/batch"):
            objects = json.loads(body)["objects"]
            for each in objects:
                each["actions"] = {"upload": {"href": f"{self.hub.url}/large/{each['oid']}"}}
            self._json({"transfer": "basic", "objects": objects})
        else:
            header, *files = (json.loads(line) for line in body.splitlines())
            for file in files:
                value = file["value"]
                is_large = file["key"] == "lfsFile"
                content = (large / value["oid"]).read_bytes() if is_large else base64.b64decode(value["content"])
                place = self.hub.folder / value["path"]
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(content)
            self.hub.commits.append((header["value"]["summary"], [file["value"]["path"] for file in files]))
            address = f"{self.hub.url}/{REPOSITORY}/commit/{COMMIT}"
            self._json({"success": True, "commitOid": COMMIT, "commitUrl": address})

    def _refused(self, status: int, reason: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Message", reason)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _names(self) -> list[str]:
        files = (path for path in self.hub.folder.rglob("*") if path.is_file())
        return sorted(path.relative_to(self.hub.folder).as_posix() for path in files)

    def _below(self, folder: str, *, is_recursive: bool) -> Any:
        root = self.hub.folder / folder
        for path in sorted(root.rglob("*") if is_recursive else root.iterdir()) if root.is_dir() else []:
            yield self._entry(path.relative_to(self.hub.folder).as_posix())

    def _entry(self, name: str) -> dict[str, Any]:
        path = self.hub.folder / name
        kind = "directory" if path.is_dir() else "file"
        oid = hashlib.sha1(name.encode(), usedforsecurity=False).hexdigest()
        return {"type": kind, "oid": oid, "size": 0 if path.is_dir() else path.stat().st_size, "path": name}

    def _json(self, value: Any) -> None:
        content = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _missing(self, code: str) -> None:
        self.send_response(404)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _file(self, name: str) -> None:
        path = self.hub.folder / name
        size = path.stat().st_size
        found = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        start, stop = (int(found[1]), min(int(found[2] or size - 1) + 1, size)) if found else (0, size)
        if self.hub.refused_from is not None and start >= self.hub.refused_from:
            self.send_response(403)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(206 if found else 200)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hashlib.sha1(name.encode(), usedforsecurity=False).hexdigest()}"')
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(stop - start))
        if found:
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{size}")
        self.end_headers()
        if self.command == "HEAD":
            return
        self.hub.reads[name] += start == 0
        with path.open("rb") as file:
            file.seek(start)
            while start < stop and (piece := file.read(min(PIECE_BYTES, stop - start))):
                self.wfile.write(piece)
                self.hub.read_bytes[name] += len(piece)
                start += len(piece)
