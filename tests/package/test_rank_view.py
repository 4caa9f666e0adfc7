"""`partc inspect DIR --rank N`: the facts of a rank, as its package's modules and plan have them."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch

from partc.errors import PartcError
from partc.package.rank_view import rank_view
from partc.runtime.layout import Shard, parse_mesh
from partc.runtime.place import coordinate

PACKAGE = Path(__file__).parents[2] / "examples" / "gpt_2x2x2"


@pytest.mark.parametrize("rank", [0, 3, 5])
def test_the_shards_of_a_rank_are_those_that_training_cuts(rank: int) -> None:
    plan = json.loads((PACKAGE / "plan.json").read_text())
    sizes = parse_mesh(plan["mesh"])
    here = coordinate(rank, sizes)
    said = dict(re.findall(r"^  (\S+)\[(.*)\]$", rank_view(PACKAGE, rank), re.MULTILINE))
    cut = set()
    for name, entry in plan["parameters"].items():
        starred = re.sub(r"\.\d+\.", ".*.", name)
        if "@" not in entry["layout"] or here["pp"] not in entry["stages"]:
            continue
        whole = torch.arange(torch.Size(entry["shape"]).numel()).reshape(entry["shape"])
        held = whole
        for dim, ranges in enumerate(said[starred].split(", ")):
            rows = [slice(*(int(end) if end else None for end in part.split(":"))) for part in ranges.split(" ")]
            held = torch.cat([held.movedim(dim, 0)[each] for each in rows]).movedim(0, dim)
        assert torch.equal(held, Shard(f"i64{entry['layout']}").local(whole, sizes, here)), name
        cut.add(starred)
    assert cut == said.keys()


def test_a_rank_has_its_peers_and_its_schedule() -> None:
    lines = rank_view(PACKAGE, 5).splitlines()
    assert lines[:3] == ["rank 5 of 8: stage 1", "coordinate: pp=1, dp=0, tp=1", "group pp: 1, 5"]
    assert "group dp: 5, 7" in lines and "group tp: 4, 5" in lines and "group dp,tp: 4, 5, 6, 7" in lines
    assert "link from stage 0 to 1: with rank 1" in lines
    plan = json.loads((PACKAGE / "plan.json").read_text())
    assert " ".join(line.strip() for line in lines[lines.index("schedule:") + 1 :]) == plan["schedule"]["1"]


WHOLE = 'MESH = "2x2x2"\nSTAGES = (0,)\nGROUPS = ("tp",)\nLINKS = {}\nSCHEDULE = "0F0"\n'


@pytest.mark.parametrize(
    "text",
    ["STAGES = (", "STAGES = open('x')", None, "", WHOLE.replace("(0,)", "0"), WHOLE.replace('("tp",)', '("pp x",)'),
     WHOLE.replace("{}", "{(0, 1): 'x'}"), WHOLE.replace('"0F0"', "7"), "STAGES = " + "-" * 100_000 + "1"],
    ids=range(9),
)  # fmt: skip
def test_a_module_that_is_changed_or_missing(tmp_path: Path, text: str | None) -> None:
    shutil.copytree(PACKAGE, tmp_path / "package")
    module = tmp_path / "package" / "ranks" / "pp_0.py"
    module.unlink() if text is None else module.write_text(text)
    with pytest.raises(PartcError, match="P0503"):
        rank_view(tmp_path / "package", 0)
