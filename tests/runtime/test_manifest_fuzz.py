"""Forged checkpoints with valid digests: each is refused or passed over, and none makes a run read outside its folder."""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import os
import shutil
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from partc.explain import CATALOGUE
from partc.runtime.checkpoint.manifest import NAME
from partc.runtime.checkpoint.restore import newest
from partc.runtime.errors import UsageError
from partc.runtime.processes.agreement import Together
from partc.runtime.torch_private import lone_store
from tests.durable import build, trained, whole

FILE = "rank_000.safetensors"
Json = Any
_opened: list[str] | None = None


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _opened is not None and event == "open" and isinstance(arguments[0], str | bytes | os.PathLike):
        _opened.append(os.path.realpath(os.fsdecode(arguments[0])))


@functools.cache
def _hooked() -> None:
    """Audit from here on: hooks stay until the process ends, and cost all that runs in it a few percent."""
    sys.addaudithook(_audit)


@contextmanager
def watched(folder: Path) -> Iterator[None]:
    """Every file that is opened meanwhile lies in the folder."""
    global _opened
    _hooked()
    _opened = []
    try:
        yield
        outside = [path for path in _opened if not path.startswith(f"{os.path.realpath(folder)}{os.sep}")]
    finally:
        _opened = None
    assert not outside, outside


class Save:
    """A folder of two checkpoints, of which the newer one is changed, and secrets next to it."""

    def __init__(self, folder: Path) -> None:
        self.package = build(folder, "dp=2")
        self.plan = json.loads((self.package / "plan.json").read_text())
        self.folder = folder / "here" / "save"
        arguments = ("--steps", 2, "--save", self.folder, "--save-every", 1, "--no-decay", "*.bias", "--clip", 1.0)
        trained(self.package, *arguments)
        self.good = folder / "good"
        self.newer = self.folder / "step_00000002"
        shutil.copytree(self.newer, self.good)
        self.manifest: Json = json.loads((self.good / NAME).read_text())
        self.tensors = whole(self.newer)
        for secret in (folder / "secret.bin", folder / "here" / "secret.bin", self.folder / "secret.bin"):
            shutil.copy(self.good / FILE, secret)  # its size and digest are those of the file that it stands for
        self.secret = folder / "secret.bin"

    def restore(self) -> None:
        if self.newer.is_symlink():
            self.newer.unlink()
        shutil.rmtree(self.newer, ignore_errors=True)
        shutil.copytree(self.good, self.newer)

    def write(self, manifest: Json) -> None:
        content = {key: value for key, value in manifest.items() if key not in ("partc_checkpoint", "sha256")}
        document = {**manifest, "sha256": hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()}
        (self.newer / NAME).write_text(json.dumps(document))

    def outcome(self) -> str:
        """The outcome of a resumed run: 'refused', 'passed over', or 'taken' if every tensor is unchanged."""
        said: list[str] = []
        with watched(self.folder):
            try:
                found = newest(self.folder, Together(lone_store(), 0, 1), needed=True, say=said.append)
                assert found is not None
                found.check_fits(self.plan)
                tensors: dict[str, Tensor] = {name: found.whole(name) for name in found.tensors}
                found.close()
            except UsageError as error:
                assert error.code in CATALOGUE and error.code in ("P0524", "P0525"), error
                return "refused"
        if found.step == 1:
            assert len(said) == 1 and said[0].startswith("passed over: the checkpoint"), said
            said[0].encode()  # whatever names there are, it can be printed
            return "passed over"
        assert tensors.keys() == self.tensors.keys()
        assert all(torch.equal(tensors[name], x) and tensors[name].dtype == x.dtype for name, x in self.tensors.items())
        return "taken"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Save:
    return Save(tmp_path_factory.mktemp("fuzz"))


def places(value: Json, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every field; of long lists and of objects by name the first and the last."""
    items = (
        list(value.items()) if isinstance(value, dict) else list(enumerate(value)) if isinstance(value, list) else []
    )
    all_of_it = len(items) < 4 or len(items) < (30, 20, 4)[min(2, len(path))]
    few = items if all_of_it else [items[0], items[-1]]
    for key, item in few:
        yield (*path, key)
        yield from places(item, (*path, key))


def replaced(document: Json, path: tuple[Any, ...], value: Json) -> Json:
    found = copy.deepcopy(document)
    inner = found
    for key in path[:-1]:
        inner = inner[key]
    if value is ...:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return found


def renamed(document: Json, path: tuple[Any, ...], name: str) -> Json:
    found = replaced(document, path, ...)
    inner = found
    for key in path[:-1]:
        inner = inner[key]
    before = document
    for key in path:
        before = before[key]
    inner[name] = before
    return found


def mutants(document: Json, secret: Path) -> Iterator[tuple[str, Json]]:
    """Each field missing, of another type, out of range, elsewhere or named otherwise."""
    for path in places(document):
        if path[0] in ("partc_checkpoint", "sha256"):
            continue
        value = document
        for key in path:
            value = value[key]
        others: list[Json] = [..., None, True, -1, 1.5, "x", [], {}, [value], {"x": value}]
        if isinstance(value, int) and not isinstance(value, bool):
            others += [value + 1, value - 1, 1 << 63, 1 << 70, str(value), float(value)]
        if isinstance(value, str):
            others += ["", "../../secret.bin", str(secret), "..", "a/b", "x\0y", "\ud800", value + "x", value.upper()]
        if isinstance(value, list):
            others += [value[:-1], [*value, 1], list(reversed(value)), value * 2]
        for other in others:
            if isinstance(path[-1], str) if other is ... else json.dumps(other) != json.dumps(value):
                yield f"{path} = {other!r:.40}", replaced(document, path, other)
        if isinstance(path[-1], str) and len(path) == 2 and path[0] in ("files", "tensors"):
            for name in ("", "../../secret.bin", str(secret), ".", "..", "\ud800", "x" * 300):
                yield f"{path} named {name!r:.40}", renamed(document, path, name)


@pytest.mark.slow
def test_every_field_of_a_manifest(saved: Save) -> None:
    found: dict[str, list[str]] = {"refused": [], "passed over": [], "taken": []}
    for what, manifest in mutants(saved.manifest, saved.secret):
        saved.write(manifest)
        found[saved.outcome()].append(what)
    saved.restore()
    # What a run was called or began with may be anything of its type; the rest decides what is read.
    assert all(what.startswith("('run', ") for what in found["taken"]), found["taken"]
    assert len(found["refused"]) + len(found["passed over"]) > 400


def rewritten(
    saved: Save, change: Callable[[Json], object] | None, data: Callable[[bytes], bytes] = lambda x: x
) -> None:
    """A file with another header, or other bytes; sizes and digests are made to fit."""
    raw = (saved.good / FILE).read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    text = raw[8 : 8 + length]
    if change is not None:
        text = json.dumps(change(header) or header).encode()
    placed(saved, data(struct.pack("<Q", len(text)) + text + raw[8 + length :]))


def placed(saved: Save, raw: bytes) -> None:
    (saved.newer / FILE).write_bytes(raw)
    files = {**saved.manifest["files"], FILE: [len(raw), hashlib.sha256(raw).hexdigest()]}
    saved.write({**saved.manifest, "files": files})


@pytest.mark.slow
def test_every_field_of_a_files_header(saved: Save) -> None:
    raw = (saved.good / FILE).read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    cases = 0
    for what, other in mutants(header, saved.secret):
        rewritten(saved, lambda _, other=other: other)  # type: ignore[misc]
        outcome = saved.outcome()
        assert outcome == "passed over" or (outcome == "taken" and "__metadata__" in what), what
        cases += outcome == "passed over"
    for changed in (
        raw[:4], b"", raw[:-1], raw + b"\0", struct.pack("<Q", 1 << 62) + raw[8:], struct.pack("<Q", 0) + raw[8:],
        struct.pack("<Q", 2) + b"[]", struct.pack("<Q", 200_000) + b"[" * 200_000, struct.pack("<Q", 3) + b"NaN",
        struct.pack("<Q", 6) + b"\xff\xfe{\0}\0", struct.pack("<Q", 20_000) + b'{"a":' + b"9" * 19_994 + b"}",
    ):  # fmt: skip
        placed(saved, changed)
        assert saved.outcome() == "passed over", changed[:20]
        cases += 1
    saved.restore()
    assert cases > 100


def one_of(saved: Save, *, boxes: int) -> str:
    """The name of a tensor that has so many boxes, along its first dimension."""
    tensors = saved.manifest["tensors"]
    return next(name for name, each in tensors.items() if len(each["boxes"]) == boxes and len(each["shape"]) == 2)


def in_file(saved: Save, name: str, leads: Path | None = None) -> None:
    """The first file under another name everywhere, and perhaps a link of that name."""
    manifest = json.loads(json.dumps(saved.manifest).replace(f'"{FILE}"', json.dumps(name)))
    if leads is not None:
        (saved.newer / FILE).unlink()
        (saved.newer / name).symlink_to(leads)
    saved.write(manifest)


def boxes(saved: Save, made: Callable[[list[int]], list[tuple[list[int], list[int]]]]) -> None:
    """Other boxes of one tensor, in the file that has it."""
    manifest = copy.deepcopy(saved.manifest)
    entry = manifest["tensors"][one_of(saved, boxes=1)]
    entry["boxes"] = [[entry["boxes"][0][0], *box] for box in made(entry["shape"])]
    saved.write(manifest)


def raw_text(change: Callable[[str], str | bytes]) -> Callable[[Save], object]:
    """The manifest's text itself, with a digest of its content where it has one."""

    def apply(saved: Save) -> None:
        saved.write(saved.manifest)
        text = change((saved.newer / NAME).read_text())
        (saved.newer / NAME).write_bytes(text.encode() if isinstance(text, str) else text)

    return apply


def instead(name: str, make: Callable[[Path], object]) -> Callable[[Save], object]:
    def apply(saved: Save) -> None:
        (saved.newer / name).unlink()
        make(saved.newer / name)

    return apply


def moved_out(saved: Save) -> None:
    away = saved.folder.parent.parent / "elsewhere"
    shutil.rmtree(away, ignore_errors=True)
    saved.newer.rename(away)
    saved.newer.symlink_to(away)


def unlisted(saved: Save) -> None:
    manifest = copy.deepcopy(saved.manifest)
    del manifest["files"][FILE]
    saved.write(manifest)


def narrower(saved: Save) -> None:
    manifest = copy.deepcopy(saved.manifest)
    for entry in manifest["tensors"].values():
        entry["dtype"] = entry["dtype"].replace("64", "32")
    saved.write(manifest)


def lonely(saved: Save) -> None:
    manifest = copy.deepcopy(saved.manifest)
    del manifest["tensors"][next(name for name in manifest["tensors"] if name.startswith("exp_avg/"))]
    saved.write(manifest)


LIES: dict[str, Callable[[Save], object]] = {
    "a way up": lambda s: in_file(s, "../../secret.bin"),
    "one way up": lambda s: in_file(s, "../secret.bin"),
    "an absolute path": lambda s: in_file(s, str(s.secret)),
    "a link that leaves": lambda s: in_file(s, "rank_000.safetensors.x", s.secret),
    "a link to a neighbour": lambda s: in_file(s, "x.safetensors", Path("..") / "secret.bin"),
    "a link round and round": lambda s: in_file(s, "x.safetensors", Path("x.safetensors")),
    "a link to nothing": lambda s: in_file(s, "x.safetensors", Path("nothing")),
    "a folder that is a link": moved_out,
    "a file that is not listed": unlisted,
    "other bits": narrower,
    "half an optimizer": lonely,
    "no boxes": lambda s: boxes(s, lambda shape: []),
    "a hole": lambda s: boxes(s, lambda shape: [([0, 0], [shape[0] - 1, shape[1]])]),
    "twice the same": lambda s: boxes(s, lambda shape: [([0, 0], shape)] * 2),
    "an overlap": lambda s: boxes(s, lambda shape: [([0, 0], [shape[0] - 1, shape[1]]), ([1, 0], [1, shape[1]])]),
    "outside": lambda s: boxes(s, lambda shape: [([1, 0], shape)]),
    "other dimensions": lambda s: boxes(s, lambda shape: [([0], [shape[0] * shape[1]])]),
    "a key twice": raw_text(lambda text: text.replace('"step": 2', '"step": 2, "step": 2')),
    "no number": raw_text(lambda text: text.replace('"step": 2', '"step": NaN')),
    "a number without end": raw_text(lambda text: text.replace('"step": 2', f'"step": {"9" * 10_000}')),
    "a number out of range": raw_text(lambda text: text.replace('"step": 2', '"step": 1e999')),
    "a byte order mark": raw_text(lambda text: b"\xef\xbb\xbf" + text.encode()),
    "another encoding": raw_text(lambda text: text.encode("utf-16")),
    "deep lists": raw_text(lambda text: "[" * 300_000),
    "deep objects": raw_text(lambda text: '{"partc_checkpoint": 1, "run": ' + '{"a":' * 5_000 + "1" + "}" * 5_001),
    "deep in a field": raw_text(lambda text: text.replace('"step": 2', '"step": ' + "[" * 900 + "]" * 900)),
    "nothing": raw_text(lambda text: ""),
    "a folder for a manifest": instead(NAME, Path.mkdir),
    "a folder for a file": instead(FILE, Path.mkdir),
    "a pipe for a manifest": instead(NAME, os.mkfifo),
    "a pipe for a file": instead(FILE, os.mkfifo),
    "a manifest elsewhere": instead(NAME, lambda path: path.symlink_to(path.parent.parent / "step_00000001" / NAME)),
    "a device": instead(NAME, lambda path: path.symlink_to("/dev/zero")),
}  # fmt: skip


def test_lies(saved: Save) -> None:
    for what, lie in LIES.items():
        saved.restore()
        lie(saved)
        assert saved.outcome() == "passed over", what
    saved.restore()
    assert saved.outcome() == "taken"
