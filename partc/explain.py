"""What `partc explain P0103` says: every error code, what it means and what to do about it."""

from __future__ import annotations

from collections.abc import Mapping

from partc.entries import PACKAGES, Entry
from partc.errors import PartcError

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
    "P0004": Entry(
        "an option's value is out of range",
        "--seed is from 0 to 4294967295; --batch and --seq are 1 or more.",
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
    "P0105": Entry(
        "nodes that do not fit the mesh",
        "--nodes says how many consecutive ranks share a node. The mesh is made of whole nodes (or one node holds it "
        "all), and an axis of the batch that goes over several nodes is cut in two, dp_out between nodes and dp_in "
        "inside them: the part inside must divide it.",
    ),
    "P0201": Entry(
        "there is no such model file",
        "MODEL is the path of a Python file, or hf:PATH/config.json for a Hugging Face configuration.",
    ),
    "P0202": Entry(
        "the model file does not import",
        "It is imported as any module is, with its own folder on the path. Code that should not run on import "
        'belongs under `if __name__ == "__main__":`.',
    ),
    "P0203": Entry(
        "the model file lacks model() or batch()",
        "A model file defines:\n\n"
        "    def model(**options) -> nn.Module           # the model\n"
        "    def batch(**options) -> dict[str, Tensor]   # one global batch: names, shapes, dtypes\n"
        "    def loss(model, batch) -> Tensor            # optional; else model(**batch), a tensor or .loss\n"
        "    def data(step) -> dict[str, Tensor]         # optional; the batch of a step; else batch() every time",
    ),
    "P0204": Entry(
        "an option that the model file does not take",
        "-D options become keyword arguments of model() and batch(), by name, converted to the type of the "
        "parameter's default. The message lists those there are.",
    ),
    "P0205": Entry(
        "the model or its batch cannot be built",
        "Models are built on torch's meta device, so that no weight is allocated, whatever their size. A "
        "constructor that computes something from a weight's values (`.item()`, `.tolist()`, numpy) cannot run there.",
    ),
    "P0206": Entry(
        "the model does not trace",
        "torch.export runs forward() once on tensors without values and records the operations. A branch or a "
        "size that depends on a tensor's value stops it: use torch.where, or sizes known from shapes and options.",
    ),
    "P0207": Entry(
        "random numbers that cannot be drawn by position",
        "Dropout and other random operations give the same result on every mesh because every element's number depends "
        "on its place in the whole tensor alone. This operation, or the single-device run of it, draws in another way.",
    ),
    "P0208": Entry(
        "the loss is not a scalar",
        "What is minimised is one number: loss(model, batch), or what model(**batch) returns, or that object's .loss.",
    ),
    "P0209": Entry(
        "a dtype that is not supported",
        "Tensors hold floating-point numbers (64, 32 or 16 bits), integers or booleans; complex ones are written "
        "as pairs of real ones.",
    ),
    "P0211": Entry(
        "forward uses a tensor that no module owns",
        "A large tensor made outside forward() has no name in the model's state. `register_buffer(name, tensor, "
        "persistent=False)` gives it one.",
    ),
    "P0212": Entry(
        "an in-place operation that others would see",
        "Changing a view, an input or a parameter in place changes other tensors too. Use the operation without "
        "the underscore and the value that it returns.",
    ),
    "P0213": Entry(
        "an operation's arguments are not as expected",
        "Where a tensor is expected the trace holds something else. This is likely a gap in partc: report the "
        "operation and its line.",
    ),
    "P0214": Entry(
        "partc.compile was given something that is no model, or no batch",
        "It takes a model file's path; or an nn.Module, or a function that builds one, together with one global batch: "
        "a dict of tensors by the names of forward's arguments.",
    ),
    "P0215": Entry(
        "code that a package could not import",
        "A package builds the model again in processes of its own. A module object is stored with its parameters "
        "and needs its classes importable by name; a function is imported from a copy of its file. Neither works "
        "for what is defined inside a function, and a script must do nothing when it is imported. Modules of your "
        "own that a model file imports are copied to sources/; none may be called stages, ranks, runtime or kernels.",
    ),
    "P0216": Entry(
        "the model has a backward pass of its own",
        "partc differentiates the operations that forward runs. A torch.autograd.Function with its own backward, "
        "and hooks on gradients of modules, weights or values, would be lost without a word: they are refused. "
        "Write the function with operations that torch differentiates, or register it with torch.library and "
        "register_autograd.",
    ),
    "P0217": Entry(
        "nothing would be trained",
        "No parameter requires gradients, forward uses none that does, or it detaches the loss from all of them. "
        "Where plain PyTorch would fail in loss.backward(), partc fails before it compiles.",
    ),
    "P0221": Entry(
        "a program's text does not parse",
        "The IR has one statement a line, as `partc inspect` prints it. The message names the line. Only text that "
        "was written or changed by hand can be malformed.",
    ),
    "P0222": Entry(
        "an operation that torch itself refuses",
        "Tracing has shapes and no values, so it lets operations pass that PyTorch refuses when it computes: products "
        "of tensors of different dtypes or of booleans, and operations without a derivative where a gradient must "
        "pass. The message names the operation and its line. A package holds all weights in one dtype, so casts "
        "in forward() follow that: x.to(self.weight.dtype), not x.bfloat16().",
    ),
    "P0223": Entry(
        "an operation that runs functions of its own",
        "torch.cond, torch.while_loop, scans, flex_attention and an enabled torch.autocast hold whole functions, whose "
        "operations partc can neither cut nor cast. Branches on shapes and options are ordinary Python; those on "
        "values are torch.where.",
    ),
    "P0225": Entry(
        "forward depends on state that a package would not have",
        "A package does in every step what was traced in one: attributes and globals that forward changes, clocks, "
        "and numbers of Python's or NumPy's random modules would keep their first values, and parameters, buffers or "
        "requires_grad that forward changes would not change. Other changes are no trouble: a counter for a log, a "
        "table that is filled once. Keep state in a registered buffer, updated by tensor operations, and draw with "
        "torch.rand or dropout.",
    ),
    "P0231": Entry(
        "the Hugging Face configuration cannot be read",
        "hf:PATH/config.json names a model's configuration file on this machine; nothing is downloaded, and no "
        "weights are read: the model starts from its architecture's own initial values.",
    ),
    "P0232": Entry(
        "an architecture that partc has no batch for",
        "The configuration's `architectures` decide what is trained: ...ForCausalLM and ...ForMaskedLM get random "
        "tokens, ...ForImageClassification random images. Any other model works from a model file of your own.",
    ),
    "P0233": Entry(
        "transformers is not installed",
        "Hugging Face models need it, to compile and to run: `pip install 'partc[hf]'`.",
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
    "P0315": Entry(
        "a rule is wrong",
        "Every rule that you register is tried before it is used: the operator on two parts, cut along each factor, "
        "against the operator on the whole, on small shapes, forward and backward. A factor that no result carries is "
        "summed, so that the parts' results must add up to the whole's: a mean's do not. Name factors that must stay "
        'whole: `partc.rule("mylib::op", "x[b s] -> [b]", blocked="s")`.',
    ),
    "P0401": Entry(
        "the batch does not divide",
        "Each of the dp ranks trains the same number of examples in each microbatch, so the batch must be a "
        "multiple of dp x microbatches.",
    ),
    "P0402": Entry(
        "an operation needs the whole batch inside a microbatch",
        "Microbatches run one after the other, so a value that mixes all examples (batch statistics, a "
        "contrastive loss, an updated buffer) does not exist while one of them runs. compile says so in a warning, "
        "and takes each microbatch for a batch of its own, over all dp ranks: statistics are the microbatch's, the "
        "loss is the mean of theirs, as where one device accumulates gradients; verify compares with just that. With "
        "--microbatches 1 they are the whole batch's. A value that is made from the inputs alone (a count of tokens) "
        "is computed once per step and is no problem.",
    ),
    "P0403": Entry(
        "more pipeline stages than calls",
        "A stage holds at least one call of a region: an embedding, a block, a head. Where there are more stages than "
        "those, blocks are cut at the modules inside them and at last in front of every weight. A model with fewer "
        "weights than that cannot fill its stages. Use a smaller pp.",
    ),
    "P0404": Entry(
        "no such schedule, precision or recomputation",
        "Schedules: gpipe runs all forwards, then all backwards; 1f1b alternates them, with less memory; "
        "interleaved is 1f1b with several stages on every rank; zero-bubble (ZB-H1), zbv (ZB-V) and dualpipe-v "
        "(DualPipeV) fill idle time with gradients of weights; FILE.csv is a table of your own. "
        "Precisions: fp32, and fp64 to see that a package equals its model to rounding. Recomputation: none saves all "
        "that backward reads; selective makes again what is large and quickly made; full saves regions' inputs alone.",
    ),
    "P0405": Entry(
        "a number of microbatches that cannot be",
        "--microbatches is 1 or more: each step's batch is trained in so many equal parts, one after the other.",
    ),
    "P0406": Entry(
        "stages that a schedule can't place",
        "gpipe and 1f1b have one stage on every pipeline rank, zbv and dualpipe-v have two, there and back. "
        "interleaved and zero-bubble deal any number round and round: --virtual-stages N puts N on each rank.",
    ),
    "P0407": Entry(
        "a schedule file that cannot be read",
        "--schedule FILE.csv takes a table of actions: a row for each pipeline rank, cells such as 0F0, 1B2, 0I1 and "
        "0W1, in the grammar of torch.distributed.pipelining. Empty cells may stand anywhere.",
    ),
    "P0408": Entry(
        "a cell of a schedule file is not an action",
        "An action is a stage's number, what it does, and a microbatch's number: F runs forward, B backward, I and W "
        "are the halves of B (gradients of inputs, gradients of weights). `(0F1;3B0)OVERLAP_F_B` is two of them.",
    ),
    "P0409": Entry(
        "a schedule file that does not fit",
        "It has a row for every coordinate of the mesh's pp axis, microbatches from 0 up to one less than "
        "--microbatches, and stages from 0 without gaps, each in one row. A row may have several stages.",
    ),
    "P0410": Entry(
        "a schedule file in which something is missing, done twice or has no place",
        "Every stage runs F once for every microbatch, and once either B, or I and then W. Sends and receives may be "
        "left out; where they are given, each goes to or comes from a stage that exists.",
    ),
    "P0411": Entry(
        "a schedule file that would wait for ever",
        "Rows run side by side, each in its order. F waits for F of the stage before, B and I for the stage's own F "
        "and for B or I of the stage after, W for I. A stage that reads from several others needs those to run "
        "their microbatches in one order.",
    ),
    "P0412": Entry(
        "durations that cannot be",
        "--durations F=1,B=2,I=1,W=1,comm=0.1 says how long a rank takes for a microbatch, forward (F), backward (B), "
        "and for the halves of a backward pass (I, W), and how long what it sends is on its way; in any unit. F is "
        "more than zero; B is I + W if it is left out.",
    ),
    "P0413": Entry(
        "parts over an axis that doesn't share the batch",
        "--zero 3 leaves each data-parallel rank a part of every parameter; --zero 3@dp_in does so over some of the "
        "batch's axes only: dp, or parts of it that the mesh names (--mesh dp_out=2,dp_in=4,tp=1). Ranks of the other "
        "axes hold other things already (tp, pp).",
    ),
    "P0414": Entry(
        "a type that an operation cannot be given",
        "With --precision bf16 or fp16, matrix products compute in few bits, softmaxes, losses and sums in fp32, and "
        "the rest as its operands are. --cast OPERATION=bf16, =fp32 or =any says otherwise for one operation, under "
        "the name that `partc inspect` shows.",
    ),
    "P0415": Entry(
        "a budget that recomputation cannot meet",
        "--recompute 18GB makes again what takes the least time, so that no rank holds more than that at one time: "
        "parameters, gradients and the optimizer's state, the batch, what is saved for backward passes, and whatever "
        "passes (`partc memory` lists it). At the least a rank saves the inputs of its regions. Less takes smaller "
        "microbatches (more of them), another schedule (1f1b holds fewer than gpipe), --zero, or more ranks to share "
        "what they hold.",
    ),
    "P0416": Entry(
        "a rank needs more memory than --memory-limit allows",
        "The account of a step, as `partc memory` shows it, is more than that on some rank. The message says of what, "
        "and lists options that lower it, each compiled and accounted for, and all that go together. The account is "
        "of tensors: on a GPU leave about 2 GiB (partc/memory.py: RESERVE) to CUDA, NCCL and libraries' work spaces.",
    ),
    "P0418": Entry(
        "losses in chunks",
        "--loss-chunks N makes logits in N parts of rows, each while its part of the loss takes, and once more for the "
        "backward pass. So a loss must read what one linear layer makes: casts, a bias, a mask of classes, views and "
        "slices of rows may stand between; anything else that reads the logits needs them whole. The weight and what "
        "it is multiplied with must be trained. Where only some losses can be made so, compile says which are not, and "
        "why.",
    ),
    "P0419": Entry(
        "a step cannot be recorded as CUDA graphs",
        "With --cuda-graphs train.py records what a GPU does in a step and repeats it, so nothing in a step may wait "
        "for the host: not experts that are given as many rows as the data says, nor transfers between pipeline ranks, "
        "which the host posts, nor what torch.compile guards. The message names what is in the way, and where it is.",
    ),
    **PACKAGES,
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
