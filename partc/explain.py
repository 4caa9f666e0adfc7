"""What `partc explain P0103` says: every error code, what it means and what to do about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from partc.errors import PartcError


@dataclass(frozen=True, slots=True)
class Entry:
    """A code's meaning in a line, and what more there is to know."""

    title: str
    text: str


AREAS: Mapping[str, str] = {
    "P00": "the command line",
    "P01": "the mesh",
    "P02": "the model and its trace",
    "P03": "layouts, pins and rules",
    "P04": "the batch and the pipeline",
    "P05": "packages: running and verifying",
    "P06": "output and inspection",
    "P07": "the environment",
}

CATALOGUE: Mapping[str, Entry] = {
    "P0001": Entry(
        "the command line does not parse",
        "An option is unknown, lacks its value, or has one that it cannot have. `partc COMMAND --help` lists "
        "a command's options.",
    ),
    "P0002": Entry(
        "no error has this code",
        "`partc explain` alone lists every code. They are a P and four digits; the first two name the area.",
    ),
    "P0003": Entry(
        "an option of -D is not NAME=VALUE",
        "-D passes options to the model file's functions: `-D layers=4 -D size=8b`. Values that read as "
        "numbers, true, false or none become those; everything else stays text.",
    ),
    "P0101": Entry(
        "the mesh does not parse",
        "A mesh is sizes (`8`, `4x8`, `2x4x8`) or names and sizes, slowest axis first (`pp=2,dp=4,tp=8`). "
        "The last axis is the one whose ranks are neighbours.",
    ),
    "P0102": Entry(
        "too many unnamed axes",
        "Up to three sizes are named by their position: `8` is dp, `4x8` is dp x tp, `2x4x8` is pp x dp x tp. "
        "With more, every axis needs its name.",
    ),
    "P0103": Entry(
        "an axis that partc doesn't know",
        "The axes are pp (pipeline stages), dp (the batch) and tp (the tensors inside an operation). "
        "They may come in any order: the last is the one whose ranks are neighbours.",
    ),
    "P0104": Entry(
        "an axis size that cannot be",
        "Every axis has one size, 1 or larger. An axis of size 1 may as well be left out.",
    ),
    "P0301": Entry(
        "a pin does not parse",
        "--shard takes GLOB=LAYOUT. The glob matches parameters by full name (`*.wq.weight`) and values as "
        "`region.value`. The layout has one entry per dimension, separated by a comma and a space: a size or `_`, "
        "then `@axis` where it is cut: `[@tp, _]`, `[_, 4096@tp]`, `[3 * 64@tp, _]`.",
    ),
    "P0302": Entry(
        "a pin that cannot be met",
        "The pinned layout cuts a dimension that its size, or every operation around it, does not allow. The "
        "message lists what is legal there. `partc inspect MODEL --mesh SPEC --explain NAME` shows what would "
        "be chosen and what the others cost.",
    ),
    "P0303": Entry(
        "a pin that matches nothing",
        "No parameter and no value has a name that the glob matches. Quote it, so that the shell leaves it "
        "alone; `partc inspect MODEL --mesh SPEC` prints every name.",
    ),
    "P0304": Entry(
        "nothing has this name",
        "Parameters are known by the full name that the model's state dict gives them, values inside a region "
        "as `region.value`, values between calls by their name in `partc inspect`.",
    ),
    "P0311": Entry(
        "a rule needs an operator's full name",
        'Operators that torch.library registers have two parts: `partc.rule("mylib::op", ...)`.',
    ),
    "P0312": Entry(
        "a rule does not parse",
        "A rule names the factors of every operand's dimensions, then those of the results: "
        '`partc.rule("mylib::scale", "x[b d], w[d] -> [b d]")`. A factor that no result carries is summed.',
    ),
    "P0313": Entry(
        "a rule's marks do not fit its text",
        "`blocked` and `linear` name factors and operands of the rule's own text; `slots` gives one position "
        "per operand.",
    ),
    "P0314": Entry(
        "a rule does not fit a call of its operator",
        "The shapes at this call cannot be those that the rule describes: another number of tensors or "
        "dimensions, or one factor with two sizes. `slots` says which arguments the operands are.",
    ),
    "P0401": Entry(
        "the batch does not divide",
        "Each of the dp ranks trains the same number of examples in each microbatch, so the batch must be a "
        "multiple of dp x microbatches.",
    ),
    "P0402": Entry(
        "an operation needs the whole batch inside a microbatch",
        "Microbatches run one after the other, so a value that mixes all examples (batch statistics, a "
        "contrastive loss) does not exist while one of them runs. With --microbatches 1 it does. A value that "
        "is made from the inputs alone (a count of tokens) is computed once per step and is no problem.",
    ),
    "P0501": Entry(
        "started on another number of ranks than compiled for",
        "A package is for one mesh. `torchrun --nproc-per-node N train.py` must start as many processes as "
        "the mesh has ranks, over all nodes together; `python train.py --virtual` runs all of them in one.",
    ),
    "P0502": Entry(
        "model.py does not make the parameters of the plan",
        "The package's copy of the model file, or a library it imports, has changed since it was compiled. "
        "Compile again.",
    ),
    "P0503": Entry(
        "not a package",
        "`partc verify`, `run` and `inspect` take a folder that `partc compile` wrote; plan.json is its mark.",
    ),
    "P0504": Entry(
        "nothing to do in no steps",
        "--steps is 1 or more.",
    ),
    "P0601": Entry(
        "the output folder is not partc's",
        "partc replaces a package that it wrote, and an empty folder, and nothing else. Give another folder "
        "with -o, or remove this one yourself.",
    ),
    "P0602": Entry(
        "the output cannot be written",
        "The folder's parent is missing, not writable or full. Nothing was changed: a package is written "
        "beside its place and then moved there as a whole.",
    ),
    "P0603": Entry(
        "the command needs a mesh",
        "`partc inspect` of a model needs --mesh SPEC; a package knows its own.",
    ),
    "P0604": Entry(
        "no pass has this name",
        "The passes, in order, are listed in passes/__init__.py and in the README; `trace` names the program "
        "before the first of them, `all` every one.",
    ),
    "P0605": Entry(
        "no region has this name",
        "Regions are the distinct bodies of the model; the message lists those there are after that pass.",
    ),
    "P0701": Entry(
        "a setting in the environment is not a number",
        "PARTC_DEBUG takes 0 to 5, PARTC_FUEL how many optional rewrites may be done.",
    ),
    "P0702": Entry(
        "a pass that cannot be left out",
        "PARTC_DISABLE names passes to leave out, separated by commas. Only those that later ones can do without.",
    ),
}


def explanation(code: str) -> str:
    """The text of a code. Raises PartcError P0002."""
    entry = CATALOGUE.get(code.strip().upper())
    if entry is None:
        raise PartcError("P0002", f"there is no error {code!r}", help="`partc explain` lists them all")
    return f"{code.strip().upper()}: {entry.title}\n\n{entry.text}"


def listing() -> str:
    """Every code with its title, by area."""
    blocks = []
    for area, name in AREAS.items():
        lines = [f"  {code}  {entry.title}" for code, entry in CATALOGUE.items() if code.startswith(area)]
        if lines:
            blocks.append("\n".join([name, *lines]))
    return "\n\n".join(blocks)
