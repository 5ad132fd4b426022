"""A hub on this machine: the few routes by which huggingface_hub lists and fetches files of data sets and models."""

import hashlib
import json
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

MAIN = "main"


def digest(text: str) -> str:
    return hashlib.sha1(text.encode()).hexdigest()


class Handler(BaseHTTPRequestHandler):
    """Serves ROOT/owner/name/REVISION, where the name of a revision has "_" for "/"."""

    protocol_version = "HTTP/1.1"
    root: Path
    asked: list[str]  # paths of the files that were fetched

    def log_message(self, *_) -> None:
        """Writes nothing on the terminal of the tests."""

    def respond(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def do_GET(self) -> None:
        parts = [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]
        is_file = "resolve" in parts  # [datasets/]O/N/resolve/REVISION/PATH, else api/KIND/O/N[/revision/REVISION]
        start = int(parts[0] == "datasets") if is_file else 2
        owner, name, *rest = parts[start:] + [""] * (2 - len(parts[start:]))  # empty for what is looked for besides
        repository = self.root / owner / name
        commits = {digest(f"{owner}/{name} {folder.name}"): folder for folder in repository.glob("*")}
        revision = rest[1].replace("/", "_") if rest else MAIN
        folder = commits.get(revision, repository / revision)
        if not folder.is_dir():
            return self.respond(404, X_Error_Code="RevisionNotFound" if repository.is_dir() else "RepoNotFound")
        commit = digest(f"{owner}/{name} {folder.name}")
        if is_file:
            file = folder.joinpath(*rest[2:])
            if not file.is_file():
                return self.respond(404, X_Error_Code="EntryNotFound", X_Repo_Commit=commit)
            if self.command == "GET":
                self.asked.append(f"{owner}/{name}/{'/'.join(rest[2:])}")
            content = file.read_bytes()
            return self.respond(200, content, ETag=f'"{digest(content.decode("latin-1"))}"', X_Repo_Commit=commit)
        names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
        answer = {"id": f"{owner}/{name}", "sha": commit, "siblings": [{"rfilename": name} for name in names]}
        if rest[:1] == ["tree"]:
            answer = [{"type": "file", "path": name, "oid": digest(name)} for name in names]
            answer = [entry | {"size": (folder / entry["path"]).stat().st_size} for entry in answer]
        return self.respond(200, json.dumps(answer).encode(), Content_Type="application/json")

    do_HEAD = do_GET


@contextmanager
def local_hub(root: Path, asked: list[str]) -> Iterator[Mapping[str, str]]:
    """Serves the data sets in a folder; yields the environment of a process that takes it for the hub."""
    handler = type("Handler", (Handler,), {"root": root, "asked": asked})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        home = {"HF_HOME": str(root / "cache"), "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_OFFLINE": "0"}
        yield os.environ | home | {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "NO_PROXY": "127.0.0.1"}
    finally:
        server.shutdown()
        server.server_close()


def put(root: Path, name: str, files: Mapping[str, bytes | str], revision: str = MAIN) -> Path:
    """Writes a data set for the hub: files by path; returns its folder."""
    folder = root / name / revision.replace("/", "_")
    for path, content in {".gitattributes": "", **files}.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder
