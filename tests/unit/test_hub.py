"""Names made into folders: the cache before the network, and a hub on this machine in place of the real
one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import pytest

import ingot
from ingot.checkpoint.checkpoint_files import small_files
from ingot.checkpoint.hub import resolve_checkpoint
from ingot.errors import CheckpointError
from tests.forked import MAY_FORK

MAIN, OTHER = "a" * 40, "b" * 40
INDEX = json.dumps(
    {"weight_map": {"x": "model-00001-of-00002.safetensors", "y": "model-00002-of-00002.safetensors"}}
)
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
COMPLETE = {"config.json": "{}", "tokenizer.json": "{}", "model.safetensors": "weights"}


def lay_out(cache: Path, commit: str, files: dict[str, str], ref: str | None = None) -> Path:
    """A repository org/name in a cache, as huggingface_hub lays it out: refs, blobs, and links to blobs."""
    root = cache / "models--org--name"
    snapshot = root / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (root / "blobs").mkdir(exist_ok=True)
    for number, (name, text) in enumerate(files.items()):
        blob = root / "blobs" / f"{commit[:4]}{number}"
        blob.write_text(text)
        (snapshot / name).symlink_to(Path("../../blobs") / blob.name)
    if ref:
        (root / "refs").mkdir(exist_ok=True)
        (root / "refs" / ref).write_text(commit)
    return snapshot


SCRIPT = f"""{MAY_FORK}
import sys
from ingot.checkpoint.hub import resolve_checkpoint
from ingot.errors import CheckpointError
try:
    print(resolve_checkpoint(*sys.argv[1:]))
except CheckpointError as error:
    print("CheckpointError:", error)
"""


def ask(*arguments: str, function: str = "resolve_checkpoint", **variables: object) -> str:
    """``resolve_checkpoint``, or another function, in a process of its own: huggingface_hub reads its
    variables when imported.
    """
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING", "TRANSFORMERS_"))}
    no_proxy = {"NO_PROXY": "*", "no_proxy": "*", "HF_HUB_DISABLE_TELEMETRY": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.replace("resolve_checkpoint", function), *arguments],
        cwd=Path(__file__).resolve().parents[2],
        env=kept | no_proxy | {name: str(value) for name, value in variables.items()},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


NO_HUB = "http://127.0.0.1:9"


def test_a_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    assert resolve_checkpoint(tmp_path) == tmp_path
    assert resolve_checkpoint(str(tmp_path), offline=True) == tmp_path


def test_a_file_is_not_a_folder(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_text("x")
    with pytest.raises(CheckpointError, match="this is a file"):
        resolve_checkpoint(tmp_path / "x.safetensors")


@pytest.mark.parametrize(
    "name",
    [
        "./none",
        "/none",
        "~/none/none",
        "~no-such-user/none",
        "a/b/c",
        "a b/c",
        "",
        "a/",
        "-x/y",
        "a..b",
        "a/bä:Q4",
        "a/b--c:Q4",
        "a/b:Q4:x",
    ],
)
def test_neither_a_folder_nor_an_id(name: str) -> None:
    with pytest.raises(CheckpointError, match="neither an existing folder nor a Hugging Face id") as caught:
        resolve_checkpoint(name)
    assert caught.value.seen == name


def test_a_slip_in_a_path_is_not_sought_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "engines" / "qwen").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="no such folder") as caught:
        resolve_checkpoint("engines/qwne")
    assert caught.value.allowed == ["qwen"]


def test_a_path_is_never_an_id() -> None:
    with pytest.raises(CheckpointError, match="neither an existing folder"):
        resolve_checkpoint(Path("org/name"))


@pytest.mark.parametrize("offline", [True, False])
def test_the_cache_comes_first(tmp_path: Path, offline: bool) -> None:
    snapshot = lay_out(tmp_path, MAIN, COMPLETE, "main")
    assert resolve_checkpoint("org/name", cache_dir=tmp_path, offline=offline) == snapshot


def test_revisions_in_the_cache(tmp_path: Path) -> None:
    lay_out(tmp_path, MAIN, COMPLETE, "main")
    other = lay_out(tmp_path, OTHER, COMPLETE, "v2")
    for revision in ("v2", OTHER):
        assert resolve_checkpoint("org/name", revision, tmp_path, offline=True) == other
    with pytest.raises(
        CheckpointError, match=r"org/name at revision v3 is not in the local cache.*HF_HUB_OFFLINE"
    ):
        resolve_checkpoint("org/name", "v3", tmp_path, offline=True)


def test_shards_that_are_not_in_the_snapshot(tmp_path: Path) -> None:
    files = {"config.json": "{}", "model.safetensors.index.json": INDEX, SHARDS[0]: "x"}
    snapshot = lay_out(tmp_path, MAIN, files, "main")
    with pytest.raises(
        CheckpointError, match=r"incomplete in the local cache.*are missing \(1 of 2\)"
    ) as caught:
        resolve_checkpoint("org/name", cache_dir=tmp_path, offline=True)
    assert caught.value.seen == SHARDS[1]
    (snapshot / SHARDS[1]).symlink_to("../../blobs/none")
    with pytest.raises(CheckpointError, match=r"are missing \(1 of 2\)"):
        resolve_checkpoint("org/name", cache_dir=tmp_path, offline=True)
    (snapshot / SHARDS[1]).unlink()
    (snapshot / SHARDS[1]).write_text("y")
    assert resolve_checkpoint("org/name", cache_dir=tmp_path, offline=True) == snapshot


def test_variables_of_the_hub_are_honoured(tmp_path: Path) -> None:
    home = tmp_path / "home"
    snapshot = lay_out(home / "hub", MAIN, COMPLETE, "main")
    assert ask("org/name", HF_HOME=home, HF_HUB_OFFLINE=1) == str(snapshot)
    cache = tmp_path / "elsewhere"
    text = ask("org/name", HF_HOME=home, HF_HUB_CACHE=cache, HF_HUB_OFFLINE=1, HF_ENDPOINT=NO_HUB)
    assert text.startswith("CheckpointError: org/name is not in the local cache, and the network is off")
    assert "HF_HUB_OFFLINE" in text
    snapshot = lay_out(cache, OTHER, COMPLETE, "main")
    assert ask("org/name", HF_HOME=home, HF_HUB_CACHE=cache, HF_ENDPOINT=NO_HUB) == str(snapshot)


def test_no_network(tmp_path: Path) -> None:
    text = ask("org/name", HF_HOME=tmp_path, HF_ENDPOINT=NO_HUB)
    assert text.startswith("CheckpointError: cannot download org/name")
    assert "HF_HUB_OFFLINE=1" in text


def test_only_small_files_of_the_top() -> None:
    names = [
        "config.json",
        "modeling_x.py",
        "original/params.json",
        "qwen.tiktoken",
        "merges.txt",
        "a.bin",
        "m.md",
    ]
    wanted = [*names[:1], "tokenizer.model", "chat_template.jinja", *names[3:5]]
    assert small_files(sorted({*names, *wanted})) == sorted(wanted)


@contextmanager
def hub(files: dict[str, str], error: tuple[int, str] | None = None) -> Iterator[tuple[str, list[str]]]:
    """A hub with one repository, org/name; yields its address and the files asked for so far."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = self.path.split("?")[0]
            if error is not None:
                self.answer(b"{}", error[0], {"X-Error-Code": error[1], "X-Error-Message": "made"})
            elif path.startswith("/api/models/org/name/tree/"):
                tree = [
                    {"type": "file", "path": n, "size": len(t), "oid": "0" * 40} for n, t in files.items()
                ]
                self.answer(json.dumps(tree).encode())
            elif path.startswith("/api/models/org/name"):
                siblings = [{"rfilename": name} for name in files]
                self.answer(json.dumps({"id": "org/name", "sha": MAIN, "siblings": siblings}).encode())
            else:
                name = path.split("/resolve/", 1)[1].split("/", 1)[1]
                asked.append(name)
                self.answer(files[name].encode(), 200, {"ETag": f'"{name}"', "X-Repo-Commit": MAIN})

        def answer(self, body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


CODE = {"modeling_x.py": "import os", "README.md": "text", "training_args.bin": "pickle"}


@pytest.mark.stays("weights0-unwanted0")
@pytest.mark.parametrize(
    ("weights", "unwanted"),
    [
        (
            {"model.safetensors.index.json": INDEX, SHARDS[0]: "x", SHARDS[1]: "y"},
            {"pytorch_model.bin": "p", "consolidated.safetensors": "c"},
        ),
        ({"model.safetensors": "x"}, {"pytorch_model.bin": "p", "model.fp16.safetensors": "f"}),
        ({"pytorch_model.bin": "p"}, {"tf_model.h5": "t"}),
    ],
)
def test_only_needed_files_are_downloaded(
    tmp_path: Path, weights: dict[str, str], unwanted: dict[str, str]
) -> None:
    wanted = {"config.json": "{}", "tokenizer.json": "{}", **weights}
    with hub({**wanted, **unwanted, **CODE}) as (address, asked):
        folder = Path(ask("org/name", HF_HOME=tmp_path, HF_ENDPOINT=address, HF_HUB_DISABLE_XET=1))
        assert {path.name: path.read_text() for path in folder.iterdir()} == wanted
        assert set(asked) == set(wanted)
        asked.clear()
        assert ask("org/name", HF_HOME=tmp_path, HF_ENDPOINT=address) == str(folder)
        assert not asked
    assert ask("org/name", HF_HOME=tmp_path, HF_HUB_OFFLINE=1) == str(folder)


def test_a_config_is_downloaded_alone_and_is_not_a_checkpoint(tmp_path: Path) -> None:
    with hub({**COMPLETE, **CODE}) as (address, asked):
        variables = {"HF_HOME": tmp_path, "HF_ENDPOINT": address, "HF_HUB_DISABLE_XET": 1}
        assert ask("org/name", function="expect_checkpoint", **variables) == "None"
        assert asked == []
        folder = Path(ask("org/name", function="resolve_config", **variables))
        assert [path.name for path in folder.iterdir()] == ["config.json"]
        assert set(asked) == {"config.json"}
        asked.clear()
        assert ask("org/name", function="resolve_config", **variables) == str(folder)
        assert not asked
        assert ask("org/name", **variables) == str(folder)
        assert {path.name for path in folder.iterdir()} == set(COMPLETE)


def test_an_id_that_the_hub_does_not_have_is_refused_before_a_download(tmp_path: Path) -> None:
    with hub(COMPLETE, (401, "RepoNotFound")) as (address, _):
        text = ask("org/name:Q4_K_M", function="expect_checkpoint", HF_HOME=tmp_path, HF_ENDPOINT=address)
    assert "no such model on the hub; seen: org/name" in text


def test_a_config_that_cannot_be_downloaded(tmp_path: Path) -> None:
    offline = ask("org/name", function="resolve_config", HF_HOME=tmp_path, HF_HUB_OFFLINE=1)
    assert "not in the local cache" in offline
    unreachable = ask("org/name", function="resolve_config", HF_HOME=tmp_path, HF_ENDPOINT=NO_HUB)
    assert "cannot download org/name" in unreachable


def test_an_incomplete_snapshot_is_completed(tmp_path: Path) -> None:
    lay_out(tmp_path / "hub", MAIN, {"config.json": "{}"}, "main")
    with hub(COMPLETE) as (address, asked):
        folder = Path(ask("org/name", HF_HOME=tmp_path, HF_ENDPOINT=address))
    assert {path.name for path in folder.iterdir()} == set(COMPLETE)
    assert "model.safetensors" in asked


@pytest.mark.stays("404-RevisionNotFound-words0", "500-Broken-words3")
@pytest.mark.parametrize(
    ("status", "code", "words"),
    [
        (404, "RevisionNotFound", ("org/name has no such revision", "seen: v9", "to fix: revision")),
        (401, "RepoNotFound", ("no such model on the hub", "seen: org/name", "local path")),
        (403, "GatedRepo", ("org/name is gated", "HF_TOKEN")),
        (500, "Broken", ("cannot download org/name at revision v9", "500")),
    ],
)
def test_what_the_hub_refuses(tmp_path: Path, status: int, code: str, words: tuple[str, ...]) -> None:
    with hub({}, (status, code)) as (address, _):
        text = ask("org/name", "v9", HF_HOME=tmp_path, HF_ENDPOINT=address)
    assert text.startswith("CheckpointError: ")
    for word in words:
        assert word in text


def test_weights_without_a_tokenizer(tmp_path: Path) -> None:
    files = {"config.json": "{}", "model.safetensors": "weights"}
    snapshot = lay_out(tmp_path / "hub", MAIN, files, "main")
    assert ask("org/name", HF_HOME=tmp_path, HF_HUB_OFFLINE=1) == str(snapshot)
    assert ask("org/name", HF_HOME=tmp_path, HF_ENDPOINT=NO_HUB) == str(snapshot)
    with hub(COMPLETE) as (address, _):
        assert ask("org/name", HF_HOME=tmp_path, HF_ENDPOINT=address) == str(snapshot)
    assert (snapshot / "tokenizer.json").is_file()


def test_a_repository_without_weights_that_can_be_read(tmp_path: Path) -> None:
    with hub({"config.json": "{}", "model-q4.onnx": "x"}) as (address, asked):
        text = ask("org/name", HF_HOME=tmp_path, HF_ENDPOINT=address)
    assert "no readable weights" in text
    assert "model-q4.onnx" in text
    assert asked
    with hub({"README.md": "x"}) as (address, asked):
        assert "has no config.json" in ask("org/name", HF_HOME=tmp_path / "b", HF_ENDPOINT=address)
    assert not asked


GGUF = {
    "m-Q8_0.gguf": "8",
    "m-Q4_K_M-00001-of-00002.gguf": "4",
    "m-Q4_K_M-00002-of-00002.gguf": "4",
    "BF16/m-BF16.gguf": "b",
    "mmproj-m-F16.gguf": "p",
    "README.md": "text",
}


Q4, Q4_2 = "m-Q4_K_M-00001-of-00002.gguf", "m-Q4_K_M-00002-of-00002.gguf"


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("org/name:q4_k_m", [Q4, Q4_2]),
        (f"org/name/{Q4_2}", [Q4, Q4_2]),
        ("org/name/BF16/m-BF16.gguf", ["BF16/m-BF16.gguf"]),
    ],
)
@pytest.mark.stays("org/name:q4_k_m-files0")
def test_gguf_files_of_a_repository(tmp_path: Path, name: str, files: list[str]) -> None:
    """Only these are downloaded; the path is the first one's, and the cache has it from then on."""
    with hub(GGUF) as (address, asked):
        path = Path(ask(name, HF_HOME=tmp_path, HF_ENDPOINT=address, HF_HUB_DISABLE_XET=1))
        assert (path.name, path.read_text()) == (Path(files[0]).name, GGUF[files[0]])
        assert set(asked) == set(files)
    assert resolve_checkpoint(name, cache_dir=tmp_path / "hub", offline=True) == path
    words = rf"org/name:Q8_0 is not in the local cache, and it may not be downloaded; seen: {files[0]}"
    with pytest.raises(CheckpointError, match=words):
        resolve_checkpoint("org/name:Q8_0", cache_dir=tmp_path / "hub", offline=True)


def test_a_repository_with_one_gguf_model(tmp_path: Path) -> None:
    with hub({"config.json": "{}", "m-Q8_0.gguf": "8", "README.md": "text"}) as (address, asked):
        path = ask("org/name", HF_HOME=tmp_path, HF_ENDPOINT=address, HF_HUB_DISABLE_XET=1)
        assert (Path(path).name, set(asked)) == ("m-Q8_0.gguf", {"m-Q8_0.gguf"})
    assert resolve_checkpoint("org/name", cache_dir=tmp_path / "hub", offline=True) == Path(path)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("org/name", r"does not name one GGUF model of the repository; seen: no file; allowed: BF16/m-BF16"),
        ("org/name:Q3_K", rf"seen: Q3_K; allowed: BF16/m-BF16\.gguf, {Q4}.*to fix: org/name:TYPE, such as"),
        ("org/name/none.gguf", "seen: none.gguf; allowed: BF16/m-BF16.gguf"),
        ("org/name:Q4_K_M", rf"parts of org/name:Q4_K_M are missing on the hub; seen: {Q4_2}"),
        ("org/name:Q6_K", "seen: Q6_K"),
    ],
)
def test_gguf_files_that_a_repository_lacks(
    name: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Api:
        def model_info(self, repo: str, revision: str | None) -> SimpleNamespace:
            names = [*(name for name in GGUF if name != Q4_2), "../m-Q6_K.gguf"]
            return SimpleNamespace(siblings=[SimpleNamespace(rfilename=name) for name in names])

    monkeypatch.setattr("ingot.checkpoint.hub_repos.HfApi", Api)
    monkeypatch.setattr("ingot.checkpoint.hub_repos.constants.HF_HUB_OFFLINE", False)
    with pytest.raises(CheckpointError, match=words):
        resolve_checkpoint(name, cache_dir=tmp_path)


def test_a_path_of_a_gguf_file_is_not_sought_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "org").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="no such file"):
        resolve_checkpoint("org/name/m.gguf")
    with pytest.raises(CheckpointError, match="no such file"):
        resolve_checkpoint(Path("other/name/m.gguf"))


def test_a_local_folder_needs_no_library_of_the_hub() -> None:
    """Which takes a tenth of a second of every start: the module with it is imported in functions alone."""
    imports = re.compile(r"^(?:from|import) .*\b(huggingface_hub|hub_repos)\b", re.MULTILINE)
    package = Path(ingot.__file__).parent
    found = {path.name: imports.findall(path.read_text(encoding="utf-8")) for path in package.rglob("*.py")}
    assert {name: set(what) for name, what in found.items() if what} == {"hub_repos.py": {"huggingface_hub"}}
