"""The user's own schedules: torch's tables are read, and every wrong table is refused with its row and cell."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

import partc
from partc.cli import main
from partc.cost.simulation import simulate
from partc.errors import PartcError
from partc.schedules import SCHEDULES, compute_order, stage_ranks
from partc.schedules.table import Table, parse, read
from tests.torch_schedules import build

MLP = Path(__file__).parents[2] / "examples" / "mlp.py"
GOOD = "0F0,0F1,,0B0,0B1\n,1F0,1B0,1F1,1B1\n"
COMMS = (
    "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1,0REDUCE_GRAD\n"
    "1UNSHARD,1RECV_F0,1F0,1RECV_F1,1B0,1SEND_B0,1F1,1B1,1SEND_B1,1RESHARD\n"
)


def table(text: str, ranks: int = 2, microbatches: int = 2) -> Table:
    return parse(text, file="mine.csv", ranks=ranks, microbatches=microbatches)


@pytest.mark.parametrize("name", ["interleaved", "zero-bubble", "zbv", "dualpipe-v"])
@pytest.mark.parametrize("layout", ["compute_only", "compute_comms"])
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (3, 6), (4, 8)])
def test_tables_that_torch_writes(name: str, layout: str, ranks: int, microbatches: int, tmp_path: Path) -> None:
    kind = SCHEDULES[name]
    stages = ranks * kind.stages_per_rank
    theirs = build(name, ranks, kind.stages_per_rank, microbatches)
    theirs._dump_csv(tmp_path / "theirs.csv", format=layout)
    found = read(tmp_path / "theirs.csv", ranks=ranks, microbatches=microbatches)
    assert found.rows == compute_order(kind, ranks, microbatches, stages)
    assert found.places == stage_ranks(kind, ranks, stages)
    assert found.split_backward == kind.split_backward


def test_cells_may_be_empty_padded_quoted_and_in_pairs() -> None:
    lines = table(GOOD).rows
    assert table('\ufeff"0F0", 0F1 ,0B0,0B1,,\r\n,,1F0,1B0,,1F1,1B1\r\n\r\n').rows == lines
    assert table("0F0,0F1,0B0,0B1\n1F0,(1B0;1F1)OVERLAP_F_B,1B1").rows == lines
    assert table(COMMS).rows == lines


WRONG = {
    # what: (table, code, row, words of the error)
    "nothing in it": ("", "P0407", None, "mine.csv is empty"),
    "only commas": (",,,\n,,\n", "P0407", None, "mine.csv is empty"),
    "an open quote": ('"0F0,0F1\n1F0,1F1\n', "P0407", None, "mine.csv is not a CSV file"),
    "a word": (GOOD.replace("1F1", "one"), "P0408", 2, "cell 4: 'one' is not an action"),
    "a kind that does not exist": (GOOD.replace("1F1", "1X1"), "P0408", 2, "cell 4: '1X1'"),
    "no microbatch": (GOOD.replace("0F1", "0F"), "P0408", 1, "cell 2: '0F'"),
    "a negative microbatch": (GOOD.replace("0F1", "0F-1"), "P0408", 1, "cell 2: '0F-1'"),
    "small letters": (GOOD.replace("0F1", "0f1"), "P0408", 1, "cell 2: '0f1'"),
    "half a pair": (GOOD.replace("1B0,1F1", "(1B0;1F1"), "P0408", 2, "cell 3: '(1B0;1F1'"),
    "two actions in a cell": (GOOD.replace("0F0,0F1", "0F0 0F1"), "P0408", 1, "cell 1: '0F0 0F1'"),
    "a row too few": ("0F0,0B0,0F1,0B1\n", "P0409", None, "mine.csv has 1 row for 2 pipeline ranks"),
    "a row too many": (GOOD + "2F0,2B0,2F1,2B1\n", "P0409", None, "3 rows for 2"),
    "an empty row": ("0F0,0B0,0F1,0B1\n,\n1F0\n", "P0409", None, "3 rows for 2"),
    "a rank without a stage": ("\n0F0,0B0,0F1,0B1\n", "P0409", 1, "the row has no action"),
    "a microbatch too many": (GOOD.replace("0B1\n", "0B1,0F2\n"), "P0409", 1, "cell 6, 0F2: the last microbatch is 1"),
    "a stage in two rows": (GOOD.replace("1B1", "0B1"), "P0409", 2, "cell 5, 0B1: stage 0 stands in row 1 already"),
    "a gap in the stages": (GOOD.replace("1F", "2F").replace("1B", "2B"), "P0409", 2, "there is no stage 1"),
    "a forward twice": (GOOD.replace("0F1", "0F0"), "P0410", 1, "cell 2, 0F0: that is done in cell 1"),
    "a forward too few": (GOOD.replace("0F1", ""), "P0410", 1, "the row lacks 0F1"),
    "a backward too few": (GOOD.replace(",1B1", ""), "P0410", 2, "the row lacks 1B1"),
    "inputs and the whole": (GOOD.replace("1B1", "1B1,1I1,1W1"), "P0410", 2, "cell 6, 1I1: that is done in cell 5: 1B1"),
    "inputs without weights": (GOOD.replace("1B1", "1I1"), "P0410", 2, "the row lacks 1W1"),
    "weights without inputs": (GOOD.replace("1B1", "1B1,1W0"), "P0410", 2, "cell 6, 1W0: that is done in cell 3: 1B0"),
    "weights alone": (GOOD.replace("1B1", "1W1"), "P0410", 2, "the row lacks 1B1"),
    "a microbatch that is left out": ("0F0,0B0\n1F0,1B0\n", "P0410", 1, "the row lacks 0F1"),
    "a send twice": (COMMS.replace("0F1,", "0SEND_F0,0F1,"), "P0410", 1, "cell 3, 0SEND_F0: that is done in cell 2"),
    "a send from the last": (COMMS.replace("1F1,", "1F1,1SEND_F1,"), "P0410", 2, "1SEND_F1: stage 1 sends nothing"),
    "a gradient for nobody": (COMMS.replace("0B1,", "0B1,0SEND_B1,"), "P0410", 1, "0SEND_B1: stage 0 sends nothing"),
    "values from nobody": (COMMS.replace("0F0,", "0RECV_F0,0F0,", 1), "P0410", 1, "0RECV_F0: stage 0 receives nothing"),
    "backward before forward": ("0F0,0B0,0B1,0F1\n1F0,1B0,1F1,1B1\n", "P0411", 1, "cell 3, 0B1: it waits forever for 0F1, later in its row"),
    "weights before inputs": ("0F0,0W0,0I0,0F1,0B1\n1F0,1B0,1F1,1B1\n", "P0411", 1, "0W0: it waits forever for 0I0"),
    "crossed orders": ("0F0,0B0,0F1,0B1\n1F1,1F0,1B0,1B1\n", "P0411", 1, "cell 2, 0B0: it waits forever for 1B0, in row 2, where 1F1 waits as well"),
    "stages in the wrong order": ("1F0,1F1,1B0,1B1,0F0,0F1,0B0,0B1\n2F0,2F1,2B0,2B1\n", "P0411", 1, "1F0: it waits forever for 0F0"),
    "a send before its value": (COMMS.replace("0F0,0SEND_F0", "0SEND_F0,0F0"), "P0411", 1, "0SEND_F0: it waits forever for 0F0"),
    "a receive after its use": (COMMS.replace("1RECV_F0,1F0", "1F0,1RECV_F0"), "P0411", 2, "1F0: it waits forever for 1RECV_F0"),
    "two that both receive first": (
        "0RECV_B0,0F0,0SEND_F0,0F1,0SEND_F1,0B0,0B1\n1F0,1F1,1B0,1SEND_B0,1B1\n", "P0411", 1, "0RECV_B0: it waits forever for 1SEND_B0",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_wrong_tables(what: str) -> None:
    text, code, row, words = WRONG[what]
    with pytest.raises(PartcError) as failure:
        table(text)
    assert failure.value.code == code
    assert words in failure.value.cause
    assert failure.value.help
    if row is not None:
        assert str(failure.value).startswith(f"mine.csv:{row}: error {code}: ")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe0F0")
    for name in ("none.csv", "bytes.csv", ""):
        with pytest.raises(PartcError) as failure:
            read(tmp_path / name, ranks=1, microbatches=1)
        assert failure.value.code == "P0407"


@pytest.mark.parametrize(
    ("text", "mesh", "arguments", "code"),
    [
        (GOOD, "pp=4", [], "P0409"),
        (GOOD, "pp=2", ["--virtual-stages", "2"], "P0406"),
        (GOOD.replace("1B1", ""), "pp=2", [], "P0410"),
        ("0F0,0B0,0F1,0B1\n1F1,1F0,1B0,1B1\n", "pp=2", [], "P0411"),
    ],
)
def test_nothing_is_written_for_a_wrong_table(
    text: str, mesh: str, arguments: list[str], code: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(text)
    command = ["compile", str(MLP), "--mesh", mesh, "--microbatches", "2", "--schedule", str(path), *arguments]
    assert main([*command, "-o", str(tmp_path / "build")]) == 2
    assert f"error {code}: " in capsys.readouterr().err
    assert not (tmp_path / "build").exists()


def test_a_package_keeps_its_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The package verifies, and can be inspected after the user's file is deleted."""
    path = tmp_path / "mine.csv"
    path.write_text(GOOD)
    command = ["compile", str(MLP), "--mesh", "pp=2", "--microbatches", "2", "--schedule", str(path)]
    assert main([*command, "--precision", "fp64", "-o", str(tmp_path / "build")]) == 0
    path.unlink()
    assert (tmp_path / "build" / "schedule.csv").read_text() == GOOD
    assert main(["verify", str(tmp_path / "build"), "--virtual", "--steps", "1"]) == 0
    capsys.readouterr()
    assert main(["inspect", str(tmp_path / "build"), "--after", "schedule"]) == 0
    assert "schedule 1: 1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1 1REDUCE_GRAD" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        ("0F1,0F0,0B0,0B1\n1F0,1F1,1B1,1B0\n", 2),  # stages that take microbatches in orders of their own
        ("0F0,1F0,0F1,1F1,3F0,3B0,3F1,3I1,1B0,0I0,1I1,0B1,0W0,1W1,3W1\n2F0,2F1,2B0,2B1\n", 2),  # one, three stages
        ("1F0,1F1,1B1,1B0\n0F0,0F1,0B0,0B1\n", 2),  # stage 0 on the second rank
    ],
)
def test_unusual_tables_train_as_one_device(text: str, ranks: int, tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(text)
    options = {"depth": 6, "batch": 8}
    package = partc.compile(
        MLP, mesh=f"pp={ranks}", microbatches=2, schedule=str(path), precision="fp64", options=options
    )
    result = package.verify(steps=2)
    assert result.ok and result.worst.rel_err < 1e-12


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_what_is_read_can_run(name: str) -> None:
    """Tables with one to three changes are refused with a code, or run to their end with everything done once."""
    kind = SCHEDULES[name]
    ranks, microbatches = 3, 4
    order = compute_order(kind, ranks, microbatches, ranks * kind.stages_per_rank)
    read_again = refused = 0
    for seed in range(300):
        rng = random.Random(seed)
        rows = [[str(compute) for compute in row] for row in order]
        for _ in range(rng.randint(1, 3)):
            row = rng.choice(rows)
            at, other = rng.randrange(len(row)), rng.randrange(len(row))
            change = rng.choice(["swap", "near", "drop", "copy", "move", "edit", "blank"])
            if change in ("swap", "near"):
                other = other if change == "swap" else min(at + 1, len(row) - 1)
                row[at], row[other] = row[other], row[at]
            elif change == "drop" and len(row) > 1:
                del row[at]
            elif change == "copy":
                row.insert(other, row[at])
            elif change == "move" and len(row) > 1:
                rng.choice(rows).append(row.pop(at))
            elif change == "edit":
                row[at] = row[at].replace(rng.choice("FBIW0123"), rng.choice("FBIWX01239- ;("), 1)
            else:
                row.insert(other, rng.choice(["", "  "]))
        try:
            found = table("\n".join(map(",".join, rows)), ranks, microbatches)
        except PartcError as error:
            assert error.code in ("P0408", "P0409", "P0410", "P0411") and error.help
            refused += 1
            continue
        read_again += 1
        assert not simulate(found.rows, found.places).stuck
        done = sorted((c.stage, c.microbatch, "B" if c.kind == "I" else c.kind) for row in found.rows for c in row)
        wanted = {(stage, m, way) for stage in range(len(found.places)) for m in range(microbatches) for way in "FB"}
        assert {item for item in done if item[2] != "W"} == wanted and len(done) == len(set(done))
    assert read_again > 20 and refused > 100


@pytest.mark.parametrize(
    "data",
    [
        b"\0",
        b"\xff\xfe0F0",
        "٠F٠,٠B٠".encode(),
        b'"' * 200_000,
        b"0F0," * 9999,
        b"x" * 100_000,
        "0F0\u2028,0B0".encode(),
    ],
)
def test_odd_files(tmp_path: Path, data: bytes) -> None:
    """Refused with a message that a terminal has room for."""
    (tmp_path / "x.csv").write_bytes(data)
    for path in (tmp_path / "x.csv", tmp_path, tmp_path / "none.csv", tmp_path / "\0.csv"):
        with pytest.raises(PartcError, match=r"P04(07|08|09|10)") as caught:
            read(path, ranks=1, microbatches=1)
        assert len(str(caught.value)) < 500 + 2 * len(str(tmp_path))


@pytest.mark.parametrize(("device", "cause"), [("pipe", "not a regular file"), ("/dev/zero", "not a regular file")])
def test_a_table_is_a_file(tmp_path: Path, device: str, cause: str) -> None:
    """A pipe would block until someone writes to it, and a device may have no end."""
    path = tmp_path / "mine.csv"
    if device == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(device)
    with pytest.raises(PartcError, match=cause) as caught:
        read(path, ranks=2, microbatches=2)
    assert caught.value.code == "P0407"
