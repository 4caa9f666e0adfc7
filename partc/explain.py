"""The catalogue of error codes for `partc explain`: the meaning of each code, and the remedy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from partc.errors import PartcError


@dataclass(frozen=True, slots=True)
class CodeExplanation:
    """The title of a code, and its explanation."""

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
    "P08": "clusters and plans",
}

CATALOGUE: Mapping[str, CodeExplanation] = {
    "P0001": CodeExplanation(
        "the command line does not parse",
        "An option is unknown, lacks its value, or has an invalid one. `partc COMMAND --help` lists a command's "
        "options.",
    ),
    "P0002": CodeExplanation(
        "no error has this code",
        "`partc explain` without a code lists all codes. A code is a P and four digits; the first two digits name the "
        "area.",
    ),
    "P0003": CodeExplanation(
        "an option of -D is not NAME=VALUE",
        "-D passes options to the model file's functions: `-D layers=4 -D size=8b`. Numbers, true, false and none are "
        "converted; everything else stays text.",
    ),
    "P0004": CodeExplanation(
        "an option's value is out of range",
        "The message names the option and the values that it takes. Sizes are numbers with a unit, such as 80GB or "
        "64GiB; counts are whole numbers, 1 or more; seeds are from 0 to 4294967295.",
    ),
    "P0101": CodeExplanation(
        "the mesh does not parse",
        "A mesh is sizes (`8`, `4x8`, `2x4x8`) or names and sizes, slowest axis first (`pp=2,dp=4,tp=8`). The ranks "
        "of the last axis are neighbours.",
    ),
    "P0102": CodeExplanation(
        "too many unnamed axes",
        "Up to three sizes are named by their position: `8` is dp, `4x8` is dp x tp, `2x4x8` is pp x dp x tp. With "
        "more, every axis needs its name.",
    ),
    "P0103": CodeExplanation(
        "an unknown axis",
        "The axes are pp (pipeline stages), dp (the batch), ep (the experts, and the batch outside them), cp "
        "(sequences) and tp (the tensors inside an operation), in any order, and pieces of dp, cp and tp: tp_out, "
        "tp_in. The ranks of the last axis are neighbours.",
    ),
    "P0104": CodeExplanation(
        "an invalid axis size",
        "Every axis has one size, 1 or larger. An axis of size 1 can be left out.",
    ),
    "P0105": CodeExplanation(
        "nodes that do not fit the mesh",
        "--nodes is the number of consecutive ranks that share a node. The mesh consists of whole nodes (or one node "
        "holds it all). A batch axis that spans several nodes is cut in two, dp_out between nodes and dp_in inside "
        "them; the size of dp_in must divide it.",
    ),
    "P0106": CodeExplanation(
        "experts over ranks that the mesh does not have",
        "`--experts ep=4@dp` cuts experts over 4 neighbours along dp: `--mesh dp=8 --experts ep=4@dp` is "
        "`--mesh dp=2,ep=4`. `ep=2@tp` takes them from tp. `ep=8@dp,cp` takes as many ranks of the last axis of the "
        "mesh as divide, and of the others those that are missing; `ep=4@dp=2,tp=2` says how many of each. `ep,cp` "
        "names axes of the mesh that experts are cut over.",
    ),
    "P0107": CodeExplanation(
        "experts that the axis ep cannot cut",
        "Experts are cut where rows with an expert each are multiplied by matrices [expert, in, out] of a parameter, "
        "and every operation between the first and the last of these products works row by row. Sorted and masked "
        "forms are brought into this one. In a model without such products, batched products with a dimension of a "
        "weight, of another operand and of the result are cut. The number of experts is a multiple of ep. Without "
        "experts, ep is a part of dp: write dp.",
    ),
    "P0108": CodeExplanation(
        "a router's bias that cannot be moved",
        "--router-bias-rate moves biases by the load of experts after each step. Such a bias is a buffer, or a "
        "parameter that is not trained, with one number for each expert; it is added to the scores by which experts "
        "are chosen, as e_score_correction_bias in DeepSeek-V3. A model that has none, or whose forward updates it, "
        "is refused. Loads are summed with gradients, in fp32: --grad-reduce bf16 and --compress-grads would round "
        "them.",
    ),
    "P0109": CodeExplanation(
        "a capacity of experts that cannot be kept",
        "--expert-capacity F bounds the rows that an expert takes: of a sequence with R rows (tokens times choices) "
        "and E experts it takes the first F·R/E, rounded up, in the order of tokens and of their choices. The results "
        "of its later rows are zero. F@microbatch counts by microbatch, over all ranks that hold it, and needs "
        "--microbatches 1, or a model whose loss is that of each microbatch. A rank is not a scope: its rows depend on "
        "the mesh. Models without chosen experts are refused, as those that send every token through every expert. "
        "partc verify compares with the model, which drops no rows, and refuses such a package.",
    ),
    "P0201": CodeExplanation(
        "there is no such model file",
        "MODEL is the path of a Python file, or hf:PATH/config.json for a Hugging Face configuration.",
    ),
    "P0202": CodeExplanation(
        "the model file does not import",
        "The file is imported like any module, with its own folder on the path. Code that should not run on import "
        'belongs under `if __name__ == "__main__":`.',
    ),
    "P0203": CodeExplanation(
        "the model file lacks model() or batch()",
        "A model file defines:\n\n"
        "    def model(**options) -> nn.Module           # the model\n"
        "    def batch(**options) -> dict[str, Tensor]   # one global batch: names, shapes, dtypes\n"
        "    def loss(model, batch) -> Tensor            # optional; else model(**batch), a tensor or .loss\n"
        "    def data(step) -> dict[str, Tensor]         # optional; the batch of a step; else batch() every time\n\n"
        "A batch may nest dicts, lists, tuples and dataclasses. `data` may be an iterable, such as a DataLoader.",
    ),
    "P0204": CodeExplanation(
        "an option that the model file does not take",
        "-D options become keyword arguments of model() and batch(), by name, converted to the type of the "
        "parameter's default. The message lists those there are.",
    ),
    "P0205": CodeExplanation(
        "the model or its batch cannot be built",
        "Models are built on torch's meta device, so that no weight is allocated, whatever their size. A constructor "
        "that reads a weight's values (`.item()`, `.tolist()`, numpy) cannot run there.\n\n"
        "A batch is a tensor, or made of dicts, lists, tuples and dataclasses, nested to any depth; its entries are "
        "dense tensors on the CPU, and constants: numbers, text, None, enums. Two entries have two paths "
        "(`inputs.ids`, `labels.0`).",
    ),
    "P0206": CodeExplanation(
        "the model does not trace",
        "torch.export runs forward() once on tensors without values and records the operations. A branch or a "
        "size that depends on a tensor's value stops it: use torch.where, or sizes known from shapes and options. "
        "Values of constants are known, and a test whose one outcome only raises or warns is assumed to pass.",
    ),
    "P0207": CodeExplanation(
        "random numbers that cannot be drawn by position",
        "Dropout and other random operations give the same result on every mesh because an element's number depends "
        "only on its position in the whole tensor. This operation, or its single-device run, draws differently.",
    ),
    "P0208": CodeExplanation(
        "the loss is not a scalar",
        "The loss is one number: loss(model, batch), or the result of model(**batch), or that object's .loss.",
    ),
    "P0209": CodeExplanation(
        "a dtype that is not supported",
        "Tensors hold floating-point numbers (64, 32 or 16 bits), integers, booleans, or complex numbers of 128 or 64 "
        "bits. partc rewrites an operation on complex numbers to operations on pairs of real ones; the one named here "
        "has no such rewrite. torch.view_as_real gives the pairs, for which you can write it yourself.",
    ),
    "P0211": CodeExplanation(
        "forward uses a tensor that no module owns",
        "A large tensor made outside forward() has no name in the model's state. `register_buffer(name, tensor, "
        "persistent=False)` gives it one.",
    ),
    "P0212": CodeExplanation(
        "an in-place operation that others would see",
        "Changing a reshape in place, which may be a view or a copy, changes other tensors too; a change by `.data` or "
        "`detach()` of a value that a backward pass reads, as relu's reads its result, changes gradients as well. Use "
        "the operation without the underscore and the value that it returns.",
    ),
    "P0213": CodeExplanation(
        "an operation's arguments are not as expected",
        "The trace holds something else where a tensor is expected. This is likely a gap in partc: report the "
        "operation and its line.",
    ),
    "P0214": CodeExplanation(
        "partc.compile was given neither a model nor a path, or no batch",
        "It takes a model file's path, or an nn.Module, or a function that builds one. A module or a function needs "
        "one global batch as well: a dict of tensors by the names of forward's arguments.",
    ),
    "P0215": CodeExplanation(
        "code that a package could not import",
        "A package builds the model again in processes of its own. A module object is stored with its parameters, and "
        "its classes must be importable by name; a function is imported from a copy of its file. Definitions inside a "
        "function cannot be imported, and importing a script must have no effects. Modules of your own that a model "
        "file imports are copied to sources/; none may be called regions, stages, ranks, runtime or kernels.",
    ),
    "P0216": CodeExplanation(
        "a backward pass that partc cannot trace",
        "partc traces the backward of a torch.autograd.Function, and hooks that return a new gradient, like forward; "
        "torch.autograd.grad becomes operations of its own, and so does a backward pass inside such a backward. "
        "It refuses what no operations of a graph stand for: functions that change their operands, "
        "backward() inside forward, torch.autograd.grad through such functions or with is_grads_batched, "
        "hooks on sums of gradients, hooks that only read, hooks on a module's operands that read the gradient of its "
        "result, and hooks on a tensor that was read before; "
        "under fp16, gradients that are not proportional to the incoming ones, whose factor would change them. "
        "Write them with operations that torch differentiates, or register them with torch.library and "
        "register_autograd.",
    ),
    "P0217": CodeExplanation(
        "nothing would be trained",
        "No parameter requires gradients, or forward uses none that does, or the loss is detached from all of them or "
        "does not depend on values at all, such as a mean over no elements. "
        "Plain PyTorch would fail in loss.backward(); partc fails before it compiles.",
    ),
    "P0221": CodeExplanation(
        "a program's text does not parse",
        "The IR has one statement a line, as `partc inspect` prints it. The message names the line. Only text that "
        "was written or changed by hand can be malformed.",
    ),
    "P0222": CodeExplanation(
        "an operation that torch itself refuses",
        "Tracing uses shapes without values, so it accepts operations that PyTorch refuses when it computes: products "
        "of tensors of different dtypes or of booleans, and operations without a derivative where a gradient must "
        "pass. The message names the operation and its line. A package holds all weights in one dtype, so casts in "
        "forward() should follow it: x.to(self.weight.dtype), not x.bfloat16().",
    ),
    "P0223": CodeExplanation(
        "an operation that runs functions of its own",
        "torch.cond, torch.while_loop, scans and an enabled torch.autocast contain whole functions, whose operations "
        "partc can neither cut nor cast. Use Python branches for shapes and options, and torch.where for values.",
    ),
    "P0225": CodeExplanation(
        "forward depends on state that a package would not have",
        "A package repeats in every step the operations that were traced once. Attributes and globals that forward "
        "changes, iterators, clocks, and numbers of Python's or NumPy's random modules would keep their first values; "
        "parameters, buffers or requires_grad that forward changes would not change. Code that may keep state is "
        "traced twice, and the traces are compared; then values that forward changes are given the opposite outcome "
        "in each comparison, or those of later steps, which shows branches of later steps. Values that `data` sets "
        "from step to step are no state of a package either: pass them in the batch. Changes that do "
        "not affect the computation are allowed, such as a counter for a log, or a table of constants that is filled "
        "once. A buffer may get another tensor of its shape, but not the memory of a weight or of another buffer. An "
        "attribute may change from None to a tensor in the first step, or from one boolean to the other, if it keeps "
        "that boolean, or the shape of that tensor, in later steps. Keep state in a registered buffer, update it by "
        "tensor operations, and draw with torch.rand or dropout.",
    ),
    "P0231": CodeExplanation(
        "the Hugging Face configuration cannot be read",
        "hf:PATH/config.json names a model's configuration file on this machine; nothing is downloaded, and no "
        "weights are read: the model starts from its architecture's own initial values.",
    ),
    "P0232": CodeExplanation(
        "an architecture that partc has no batch for",
        "The configuration's `architectures` decide what is trained: ...ForCausalLM and ...ForMaskedLM get random "
        "tokens, ...ForImageClassification random images, ...ForCTC random sounds, ...ForPrediction random series, and "
        "a bare ...Model random targets for its features. Any other model works from a model file of your own.",
    ),
    "P0233": CodeExplanation(
        "transformers is not installed, or cannot import the architecture",
        "Hugging Face models need it, to compile and to run: `pip install 'partc[hf]'`.",
    ),
    "P0301": CodeExplanation(
        "a pin does not parse",
        "--shard takes GLOB=LAYOUT. The glob matches parameters by full name (`*.wq.weight`) and values as "
        "`region.value`. The layout has one entry per dimension, separated by a comma and a space: a size or `_`, "
        "then `@axis` where it is cut: `[@tp, _]`, `[_, 4096@tp]`, `[3 * 64@tp, _]`. An embedding table may be `whole` "
        "on one rank, or `whole 2` on rank 2 of those that share the tables.",
    ),
    "P0302": CodeExplanation(
        "a pin that cannot be met",
        "The pinned layout cuts a dimension that its size, or every operation around it, does not allow. The message "
        "lists the legal layouts. `partc inspect MODEL --mesh SPEC --explain NAME` shows the choice without the pin, "
        "and the costs of the others.",
    ),
    "P0303": CodeExplanation(
        "a pin that matches nothing",
        "No parameter and no value has a name that the glob matches. Quote the glob, so that the shell does not "
        "expand it; `partc inspect MODEL --mesh SPEC` prints every name.",
    ),
    "P0304": CodeExplanation(
        "nothing has this name",
        "Parameters have the full names of the model's state dict, values inside a region are `region.value`, and "
        "values between calls have the names that `partc inspect` prints.",
    ),
    "P0305": CodeExplanation(
        "--batch-over does not parse",
        "--batch-over takes AXIS=CALL,CALL: an axis that cuts weights or sequences, and globs of calls whose batch it "
        "cuts instead. `blocks.0-15` stands for the blocks 0 to 15. A semicolon separates several axes.",
    ),
    "P0306": CodeExplanation(
        "--batch-over matches no call",
        "The globs match names of calls, such as `embed`, `blocks.0` and `head`. `partc inspect MODEL --mesh SPEC` "
        "prints them. Calls that depend on the batch's inputs alone are computed on all ranks of the axis.",
    ),
    "P0311": CodeExplanation(
        "a rule needs an operator's full name",
        'Operators that torch.library registers have two parts: `partc.rule("mylib::op", ...)`.',
    ),
    "P0312": CodeExplanation(
        "a rule does not parse",
        "A rule names the factors of every operand's dimensions, then those of the results: "
        '`partc.rule("mylib::scale", "x[b d], w[d] -> [b d]")`. A factor that no result carries is summed.',
    ),
    "P0313": CodeExplanation(
        "a rule's marks do not fit its text",
        "`blocked` and `linear` name factors and operands of the rule's own text; `slots` gives one position "
        "per operand.",
    ),
    "P0314": CodeExplanation(
        "a rule does not fit a call of its operator",
        "The shapes at this call contradict the rule: another number of tensors or dimensions, or one factor with two "
        "sizes. `slots` gives the positions of the operands among the arguments.",
    ),
    "P0315": CodeExplanation(
        "a rule is wrong",
        "Every rule that you register is tried before it is used: the operator on two parts, cut along each factor, "
        "against the whole operator, on small shapes, forward and backward. A factor that no result carries is "
        "summed, so the parts' results must add up to the whole result; a mean's do not. Name factors that must stay "
        'whole: `partc.rule("mylib::op", "x[b s] -> [b]", blocked="s")`.',
    ),
    "P0401": CodeExplanation(
        "the batch does not divide",
        "Each of the dp ranks trains the same number of examples in each microbatch, so the batch must be a "
        "multiple of dp x microbatches. Where each microbatch is a batch of its own (P0402), a list of constants with "
        "one for each example is cut too, and has to be equal in all microbatches.",
    ),
    "P0402": CodeExplanation(
        "an operation needs the whole batch inside a microbatch",
        "Microbatches run one after the other, so a value that mixes all examples (batch statistics, a contrastive "
        "loss, an updated buffer) does not exist while one of them runs. partc compile then warns, and treats each "
        "microbatch as a batch of its own, over all dp ranks: statistics are those of the microbatch, and the loss is "
        "the mean over microbatches, as in gradient accumulation on one device; partc verify compares with this. With "
        "--microbatches 1 the statistics are those of the whole batch. A value that depends on inputs only (a count "
        "of tokens) is computed once per step and is exact. A balancing loss of the whole batch is a product of sums "
        "over all tokens, whose gradient in the first microbatch needs the last one: of losses by token or by "
        "sequence, microbatches have exact shares. Integers of the batch that number rows of the whole batch, such as "
        "the ends of a graph's edges, reach beyond a microbatch: such a model needs --microbatches 1. So does one that "
        "packs the rows of all examples, such as patches of pictures, into an entry of which a microbatch has places "
        "for some.",
    ),
    "P0403": CodeExplanation(
        "more pipeline stages than calls",
        "A stage holds at least one call of a region: an embedding, a block, a head. If there are more stages than "
        "calls, blocks are cut at their inner modules and finally before every weight. A model with fewer weights "
        "than stages cannot be cut: use a smaller pp.",
    ),
    "P0404": CodeExplanation(
        "no such schedule, precision or recomputation",
        "Schedules: gpipe runs all forwards, then all backwards; 1f1b alternates them, with less memory; interleaved "
        "is 1f1b with several stages on every rank; zero-bubble (ZB-H1), zbv (ZB-V) and dualpipe-v (DualPipeV) fill "
        "idle time with gradients of weights; FILE.csv is a table of your own. Precisions: fp32, bf16, fp16, and fp64 "
        "for verification to rounding. Recomputation: none computes nothing again; selective recomputes large and "
        "cheap values; full saves only the inputs of regions.",
    ),
    "P0405": CodeExplanation(
        "an invalid number of microbatches",
        "--microbatches is 1 or more: each step's batch is trained in this number of equal parts, one after the other.",
    ),
    "P0406": CodeExplanation(
        "stages that a schedule cannot place",
        "gpipe and 1f1b have one stage on every pipeline rank; zbv and dualpipe-v have two, there and back. "
        "interleaved and zero-bubble assign any number round-robin: --virtual-stages N puts N on each rank.",
    ),
    "P0407": CodeExplanation(
        "a schedule file that cannot be read",
        "--schedule FILE.csv takes a table of actions: a row for each pipeline rank, with cells such as 0F0, 1B2, 0I1 "
        "and 0W1, in the grammar of torch.distributed.pipelining. Cells may be empty.",
    ),
    "P0408": CodeExplanation(
        "a cell of a schedule file is not an action",
        "An action consists of a stage's number, a letter, and a microbatch's number: F runs forward, B backward, I "
        "and W are the halves of B (gradients of inputs, gradients of weights). `(0F1;3B0)OVERLAP_F_B` is a pair.",
    ),
    "P0409": CodeExplanation(
        "a schedule file that does not fit",
        "The file has a row for every coordinate of the mesh's pp axis, microbatches from 0 to --microbatches less 1, "
        "and stages from 0 without gaps, each in one row. A row may have several stages.",
    ),
    "P0410": CodeExplanation(
        "a schedule file with a missing, repeated or misplaced action",
        "Every stage runs F once for every microbatch, and once either B, or I and then W. Sends and receives may be "
        "left out; if given, each goes to or comes from an existing stage.",
    ),
    "P0411": CodeExplanation(
        "a schedule file that deadlocks",
        "Rows run side by side, each in its order. F waits for F of the stage before; B and I wait for the stage's "
        "own F and for B or I of the stage after; W waits for I. A stage that reads from several others needs those "
        "to run their microbatches in one order.",
    ),
    "P0412": CodeExplanation(
        "invalid durations",
        "--durations F=1,B=2,I=1,W=1,comm=0.1 gives a rank's times for a microbatch: forward (F), backward (B), the "
        "halves of backward (I, W), and a transfer (comm), in any unit. F is more than zero; B defaults to I + W.",
    ),
    "P0413": CodeExplanation(
        "ZeRO over an axis that does not share the batch",
        "--zero 3 shards every parameter over the data-parallel ranks; --zero 3@dp_in shards over some of the batch "
        "axes only: dp, or pieces of it that the mesh names (--mesh dp_out=2,dp_in=4,tp=1). --zero 3@4 shards over 4 "
        "neighbours in dp, which 4 divides. Ranks of the other axes (tp, pp) hold different values already.",
    ),
    "P0414": CodeExplanation(
        "an invalid type for an operation",
        "With --precision bf16 or fp16, matrix products compute in 16 bits, softmaxes, losses and sums in fp32, and "
        "other operations in the type of their operands. --cast OPERATION=bf16, =fp32 or =any overrides this for one "
        "operation, by the name that `partc inspect` shows.",
    ),
    "P0415": CodeExplanation(
        "a budget that recomputation cannot meet",
        "--recompute 18GB recomputes in the least time such that no rank ever holds more: parameters, gradients and "
        "the optimizer's state, the batch, saved values, and temporaries (`partc memory` lists them). At the least a "
        "rank saves the inputs of its regions. To need less: smaller microbatches (more of them), another schedule "
        "(1f1b holds fewer than gpipe), --zero, or more ranks.",
    ),
    "P0416": CodeExplanation(
        "a rank needs more memory than --memory-limit allows",
        "The account of a step, as `partc memory` shows it, exceeds the limit on some rank. The message lists its "
        "contents, and options that lower it, each compiled and accounted for, and their combination. The account "
        "covers tensors: on a GPU leave about 2 GiB (partc/cost/memory.py: RESERVE) for CUDA, NCCL and the workspaces "
        "of libraries.",
    ),
    "P0418": CodeExplanation(
        "losses in chunks",
        "--loss-chunks N computes logits in N chunks of rows, each for its part of the loss only, and again for the "
        "backward pass. So the loss must read the result of one linear layer; casts, a bias, a mask of classes, views "
        "and slices of rows may stand between. Any other reader of the logits needs them whole. The weight and its "
        "input must be trained. If only some losses can be chunked, compile names the others with the reasons.",
    ),
    "P0419": CodeExplanation(
        "a step cannot be recorded as CUDA graphs",
        "With --cuda-graphs train.py records a GPU's step and replays it, so nothing in a step may wait for the host: "
        "no experts whose numbers of rows depend on data, no transfers between pipeline ranks, which the host posts, "
        "and no guards of torch.compile. The message names the obstacle and its place.",
    ),
    "P0420": CodeExplanation(
        "a program that only runs forward, and that the ranks cannot run",
        "evaluate(model, batch) of the model file runs forward on the ranks of the training, with the parameters where "
        "they are: its layouts must be the training's, and stages are sent only what earlier stages hold. It draws no "
        "random numbers, and makes its results on the ranks that make the loss. infer(model, batch) draws none either.",
    ),
    "P0421": CodeExplanation(
        "decisions by stage that do not fit the stages",
        "--stage-calls 9,8,8,9 are the numbers of calls (embedding, blocks, head) of four stages, in order; 9,8*2,9 is "
        "the same. They add up to the number of calls, which the message lists. --recompute full*2/none*2 has a way "
        "for each stage. There are as many stages as pipeline ranks, times --virtual-stages; calls that share a buffer "
        "which forward changes are on one stage.",
    ),
    "P0422": CodeExplanation(
        "a sparse gradient that cannot be had",
        "nn.Embedding(sparse=True), nn.EmbeddingBag(sparse=True) and the optimizers sparseadam and rowwise_adagrad "
        "keep the gradient of a table as the rows that lookups read. Such a table is cut over all axes over which its "
        "gradient would be a sum, so lookups of ids that these axes cut must be all that reads it, on one pipeline "
        "rank. Choose another optimizer for this table with --group, or read it by lookups alone.",
    ),
    "P0423": CodeExplanation(
        "counts of rows that compressed gradients would round",
        "If no row reaches an expert behind a mask test in a step, torch's optimizers leave its parameters as they "
        "are. Packages sum the number of rows with the gradients. --compress-grads rounds these numbers, and adds the "
        "error to those of the next step: the optimizer would leave out an expert that has rows, or update one that "
        "has none.",
    ),
    "P0501": CodeExplanation(
        "started on another number of ranks than compiled for",
        "A package is for one mesh. `torchrun --nproc-per-node N train.py` must start as many processes as the mesh "
        "has ranks, over all nodes together; `python train.py --virtual` runs all of them in one process.",
    ),
    "P0502": CodeExplanation(
        "model.py does not make the parameters of the plan",
        "The package's copy of the model file, or a library it imports, has changed since it was compiled. "
        "Compile again.",
    ),
    "P0503": CodeExplanation(
        "not a package",
        "`partc verify`, `run` and `inspect` take a folder that `partc compile` wrote; plan.json is its mark.",
    ),
    "P0504": CodeExplanation(
        "a run or verification of no steps, or an option that verify does not take",
        "--steps is 1 or more. `partc run` trains; a package of --forward-only has infer.py. "
        "`partc verify` starts from the seed and saves nothing. It takes train.py's options of "
        "the optimizer, such as --optimizer, --lr, --weight-decay, --clip, --accumulate and --warmup.",
    ),
    "P0505": CodeExplanation(
        "the package, or its single-device model, stopped with an error",
        "The end of its output is shown; the first rank that failed has the reason, and the others stop because of "
        "it. If a rank dies, is stopped by a signal or never comes, the others name it, with its last activity and "
        "their own.",
    ),
    "P0506": CodeExplanation(
        "a package without a readable memory account",
        "plan.json contains the ranks' memory in a step under `memory`, which `partc memory` shows. Packages of an "
        "older partc have none, nor have packages whose memory depends on values in the batch.",
    ),
    "P0521": CodeExplanation(
        "an invalid option of train.py",
        "Numbers are finite and in the range that the message gives; patterns match something; --resume without a "
        "folder continues that of --save. The checkpoint determines the seed, the optimizer and --accumulate of a "
        "training: leave them out with --resume. --lr may change.",
    ),
    "P0522": CodeExplanation(
        "a folder with another training's checkpoints",
        "A run never overwrites checkpoints. Continue the newest with --resume, or name another folder with --save. "
        "To continue from an older checkpoint, name another folder too, since the newer ones would be overwritten.",
    ),
    "P0523": CodeExplanation(
        "there is no checkpoint to resume from",
        "--resume takes the folder of --save, and finds its newest whole checkpoint, or one of its folders "
        "step_00000300. `--save DIR --resume` starts from the beginning if DIR has no checkpoint yet.",
    ),
    "P0524": CodeExplanation(
        "a damaged checkpoint",
        "Every file is checked against the sizes and sha256 digests in manifest.json before anything is read. "
        "`--resume DIR` skips damaged checkpoints and takes the newest whole one; `--resume DIR/step_...` refuses. A "
        "run that reaches the same step again moves the damaged checkpoint to step_....damaged.*.",
    ),
    "P0525": CodeExplanation(
        "a checkpoint of another model",
        "Names, shapes and element types of all parameters must equal the plan's. Mesh, stages, microbatches, layouts "
        "and schedule may differ.",
    ),
    "P0526": CodeExplanation(
        "a checkpoint cannot be written",
        "The folder is full, not writable, or not the same on all ranks: all ranks write into one folder, which the "
        "nodes share. The newest complete checkpoint is unchanged.",
    ),
    "P0527": CodeExplanation(
        "a file of initial parameters that does not fit",
        "--init takes a state dict of the model as safetensors: a file, model.safetensors.index.json, or the folder "
        "of a Hugging Face model. It must contain every parameter with its shape, tied ones under any of their names, "
        "and nothing unknown to the model. Element types may be narrower (bf16 for f32), never wider.",
    ),
    "P0528": CodeExplanation(
        "the loss is not finite",
        "With --check-nans all ranks stop before the update when the loss is NaN or infinite, run the step again and "
        "name the first region whose inputs are finite and whose results are not. Exit code 1.",
    ),
    "P0529": CodeExplanation(
        "TensorBoard is not installed",
        "train.py --tensorboard writes for it with torch.utils.tensorboard, which needs the tensorboard package: "
        "`pip install tensorboard`, or `pip install 'partc[tensorboard]'`. --metrics FILE holds the same numbers as "
        "lines of JSON and needs nothing.",
    ),
    "P0530": CodeExplanation(
        "the model file's data function fails",
        "train.py calls data(step) of model.py for every batch, with the -D options that it takes. A package contains "
        "the Python files that the model file imports, but not the data that these read: put data where every rank "
        "finds it, and name it by an option (`-D text=/data/book.txt`) or an environment variable.",
    ),
    "P0531": CodeExplanation(
        "Triton is not installed",
        "The package has Triton kernels (`--kernels triton`). PyTorch for CUDA includes Triton; elsewhere use `pip "
        "install triton`. On CPUs the kernels run slowly in Triton's interpreter, for verification. `--kernels aten` "
        "needs no Triton.",
    ),
    "P0532": CodeExplanation(
        "a file of kernel configurations cannot be used",
        "On its first run on a GPU a package with Triton kernels times a few configurations of each (block sizes, "
        "warps) and keeps the fastest in kernels/tuned.json, by GPU, version of Triton and kernel. --tuned FILE reads "
        "another file of this form; its values for a kernel must occur in the kernel's CANDIDATES (see kernels/). "
        "--no-tuning uses the package's own configurations.",
    ),
    "P0533": CodeExplanation(
        "a step cannot be recorded as CUDA graphs",
        "train.py --cuda-graphs (the default of a package that was compiled with it) needs a GPU for each process, "
        "and a step without work of the host (P0419). It excludes --check-nans and --trace. --no-cuda-graphs trains "
        "without graphs.",
    ),
    "P0534": CodeExplanation(
        "CUDA refused to record a step",
        "Some operation of the step, perhaps one of the model's own, waits for the device or copies from the host. "
        "The message quotes CUDA. --no-cuda-graphs trains without graphs.",
    ),
    "P0535": CodeExplanation(
        "the command line of train.py does not parse",
        "An option is unknown, lacks its value, or has an invalid one. `python train.py --help` lists the options; "
        "`partc run DIR` takes the same.",
    ),
    "P0536": CodeExplanation(
        "the ranks cannot meet",
        "Processes find each other by the variables that torchrun sets: RANK, WORLD_SIZE, and MASTER_ADDR and "
        "MASTER_PORT of rank 0, which opens a store there unless the launcher holds it. Each rank is one process, and "
        "each job has a port of its own. A torchrun that was stopped starts no ranks. A rank that does not come is "
        "named after 20 seconds; the others wait for it for --timeout seconds.",
    ),
    "P0537": CodeExplanation(
        "not enough memory",
        "The machine or its GPU ran out of memory; the message names the action, and the last layer for whose experts "
        "on this rank more rows than the mean have come: `--expert-rows F` accounts for F times the mean, and "
        "--expert-capacity bounds rows. `partc memory DIR` shows the peak of "
        "each rank, and its moment. More ranks, --zero, --recompute, smaller microbatches and --loss-chunks lower it. "
        "Exit code 1.",
    ),
    "P0538": CodeExplanation(
        "a file of the run cannot be written",
        "--metrics, --tensorboard, --trace, --record and --report name files that ranks write. `partc run`, and "
        "train.py if all ranks are on one machine, check them before they start; a file that no run wrote is not "
        "replaced. A disk that fills up later stops the run, and --resume continues it from its last checkpoint.",
    ),
    "P0539": CodeExplanation(
        "another run saves into the folder",
        "One run at a time may save into a folder. Every rank locks the file .lock there, which names the process of "
        "the run's rank 0 and its host. The kernel releases the lock when the processes end, so a killed run can be "
        "resumed within seconds. The file itself may stay.",
    ),
    "P0540": CodeExplanation(
        "some ranks have a GPU of their own and others have none",
        "Either every rank computes on a GPU of its own, or all compute on CPUs. A rank's GPU is that of its place "
        "among its machine's processes (LOCAL_RANK), or the only one that its process sees (CUDA_VISIBLE_DEVICES, "
        "SLURM's --gpus-per-task). The message names a rank that sees no GPU although rank 0 sees some, that has no "
        "GPU left, or that shares one. `train.py --device cpu` trains on CPUs, `--device cuda` refuses to.",
    ),
    "P0541": CodeExplanation(
        "an attention kernel that this machine does not have",
        "train.py --attention names the preferred kernel on GPUs: cudnn, flash3 (the package flash-attn-3, on GPUs of "
        "compute capability 9.0), flash, efficient, or blocks, which is plain operations. By default the first of "
        "these that the GPU and torch support is used; train.py prints it with the reasons against those before it.",
    ),
    "P0542": CodeExplanation(
        "an operation has no deterministic algorithm",
        "`train.py --deterministic` makes torch use algorithms that give the same bits in every run on the same GPUs, "
        "and fail where there is none. They cost time, which has not been measured yet: cuDNN's attention, "
        "FlashAttention 3 and sums inside switches (NVLS) are excluded, the backward pass of flash attention sums in "
        "order, indexed sums sort first. On CPUs, and in kernels of `--kernels triton`, sums always have a fixed "
        "order.",
    ),
    "P0543": CodeExplanation(
        "a batch of another form than the compiled one",
        "Every batch of data has the entries of batch(), with their shapes. Entries that are not tensors were compiled "
        "in as constants, so that each batch must have the same. So was the largest number of an entry, if the model "
        "reads it in Python, such as `int(lengths.max())`. A DataLoader makes batches of one size with "
        "`drop_last=True`. It gives whole batches: every rank takes its own part of them.",
    ),
    "P0544": CodeExplanation(
        "the data ends before the training",
        "An iterable that ends is started again, as another epoch, unless --data-end error is given. An iterator can "
        "be read once only: have data return a new one, or be a generator function.",
    ),
    "P0545": CodeExplanation(
        "a token file that cannot be used",
        "`train.py --data tokens.bin` reads little-endian numbers without a header, of --data-dtype; `--data "
        "tokens.npy` one row of integers that numpy.save wrote. They fill a batch of one or two entries of integers, "
        "(rows, length): the tokens and their labels. Each token must be below the number of rows of the model's "
        "embedding, and of the classes of its loss, where partc finds these in the model.",
    ),
    "P0546": CodeExplanation(
        "a package without an evaluation",
        "train.py --eval-every runs evaluate(model, batch) of the model file: a function that returns scalars, which "
        "is compiled with the loss. --eval-data names its token file, or eval_data in the model file gives batches.",
    ),
    "P0549": CodeExplanation(
        "a package for several nodes cannot run on one machine",
        "`partc run` starts all ranks on this machine, at most 64. For more, start one command on each node: `partc "
        "run` and the package's README print them. A node has 8 ranks, or as many as `partc compile --nodes` gave.",
    ),
    "P0551": CodeExplanation(
        "an optimizer, or an option of one, that packages do not have",
        "train.py --optimizer takes torch.optim's classes by their names in small letters, and lion. Options are those "
        "of the class (`--betas 0.9,0.95`, or `--optimizer adamw:betas=0.9,0.95`); the message lists them. --group "
        "'GLOB,...:OPTION=VALUE,...' gives parameters options of their own. LBFGS evaluates the loss several times in "
        "a step, and moments of 8 bits have blocks that shards would cut elsewhere. sparseadam needs sparse gradients, "
        "and a package with sparse gradients an optimizer that takes them: both are compiled for. "
        "A model file's optimizer(model) returns one of these classes from torch.optim, or a list of several.",
    ),
    "P0552": CodeExplanation(
        "a row for an expert that does not exist",
        "A router chose a number that is not below the number of its layer's experts, or an id is beyond the rows of "
        "its table, so the row cannot travel to the rank that it is for. The message names the layer and the number. "
        "Exit code 1.",
    ),
    "P0553": CodeExplanation(
        "a model that stops on a single device",
        "partc verify compares a package with a plain run of its model, and the model's own code raised an exception. "
        "Packages do not run checks of values, which compiling lists. In bf16 and fp16 the plain run is under "
        "torch.autocast, which casts the operands of fewer operations than partc does: some, such as index_add, get "
        "operands of two types and fail. If microbatches are batches of their own, entries of the batch with other "
        "numbers of rows are whole in each of them, which the model may not expect.",
    ),
    "P0601": CodeExplanation(
        "the output folder is not partc's",
        "partc replaces packages that it wrote and empty folders, and nothing else. Give another folder with -o, or "
        "remove this one yourself.",
    ),
    "P0602": CodeExplanation(
        "the output cannot be written",
        "The folder's parent is missing, not writable or full. Nothing was changed: a package is written next to "
        "its place and then moved there as a whole.",
    ),
    "P0603": CodeExplanation(
        "the command needs a mesh",
        "`partc inspect` of a model needs --mesh SPEC; a package knows its own.",
    ),
    "P0604": CodeExplanation(
        "no pass has this name",
        "The passes, in order, are listed in passes/__init__.py and docs/architecture.md; `trace` is the program "
        "before the first of them, `all` stands for every pass.",
    ),
    "P0605": CodeExplanation(
        "no region has this name",
        "Regions are the distinct bodies of the model; the message lists the regions after that pass.",
    ),
    "P0606": CodeExplanation(
        "a package that was changed by hand",
        "files.sha256 in the package holds the digest of every file that partc wrote; `sha256sum -c files.sha256` "
        "shows the differences. Compiling over them would lose the changes.",
    ),
    "P0607": CodeExplanation(
        "not a trace",
        "`partc trace` takes a folder that `train.py --trace DIR` wrote, with one file from every rank, all of the "
        "same run and steps; after a run on several machines, copy their files together. It also takes a package, and "
        "then shows the predicted step alone.",
    ),
    "P0608": CodeExplanation(
        "the trace is of another package",
        "A trace contains the digest of the plan.json of its package. The package given with --package has another "
        "digest: compile it again with the same options, or leave --package out.",
    ),
    "P0609": CodeExplanation(
        "an example's name is taken",
        "`partc examples DIR` copies partc's example model files into DIR. Existing files with other contents are "
        "kept.",
    ),
    "P0610": CodeExplanation(
        "no rank has this number",
        "`partc inspect DIR --rank N` shows one rank of a package; ranks count from 0 in the order of the mesh, the "
        "last axis fastest.",
    ),
    "P0701": CodeExplanation(
        "a setting in the environment is not a number",
        "PARTC_DEBUG is from 0 to 5; PARTC_FUEL is the number of optional rewrites.",
    ),
    "P0702": CodeExplanation(
        "a pass that cannot be left out",
        "PARTC_DISABLE names passes to leave out, separated by commas; they must be optional.",
    ),
    "P0801": CodeExplanation(
        "a cluster cannot be read",
        "A cluster is a text such as 8xH100-80GB, 16x8xA100-80GB (nodes x devices) or 4xCPU, or a TOML file. A file "
        "has nodes, devices and device (a preset's name, or a table with name, memory, peak, bandwidth, cores, launch, "
        "host, kind), and may have domain, the tables inside and between (kind, gigabytes, latency, switched, reduces) "
        "and network (kind, dims, leaf, oversubscription). Fields that contradict each other are refused.",
    ),
    "P0802": CodeExplanation(
        "no device has this name",
        "The message lists the devices that are known. A TOML file describes others.",
    ),
    "P0803": CodeExplanation(
        "a mesh is larger than the cluster",
        "Every rank needs a device of its own.",
    ),
    "P0804": CodeExplanation(
        "a plan cannot be read",
        "A plan is a JSON object: mesh, and optionally microbatches, schedule, virtual_stages, stage_calls, zero, "
        "recompute, precision, kernels, cuda_graphs, experts, loss_chunks, bucket, nodes, grad_reduce, compress_grads, "
        "optimizer, and options, which are those of the model file; for predictions alone attention, tp_overlap, "
        "dp_overlap, ep_by_node, gradients, weights and offload. Other fields are refused. `partc plan -o FILE` writes "
        "one, `partc compile --plan FILE` reads one, and `partc simulate --plans FILE` reads one a line; a line that "
        "cannot be read has this error in its place of the results.",
    ),
    "P0805": CodeExplanation(
        "constants of the cost model cannot be read",
        "`--calibration FILE` is a TOML file with some of products, attention, streaming, inside, between, slowdown. "
        "`partc cluster show SPEC` prints their values.",
    ),
    "P0806": CodeExplanation(
        "partc fails on a plan",
        "A bug in partc; the predictions of the other plans are valid. `partc compile` with the same options shows the "
        "failure in full.",
    ),
    "P0807": CodeExplanation(
        "measuring did not finish",
        "`partc cluster measure` starts processes of this Python on this machine, which meet over gloo. One of them "
        "failed, or they took longer than five minutes: try fewer processes. With --nodes, the command must run on "
        "every node at the same time, and all must reach --master; GLOO_SOCKET_IFNAME names the network interface.",
    ),
    "P0808": CodeExplanation(
        "--failures cannot be read",
        "`partc simulate --failures` takes mtbf (hours between two failures of one device), and in seconds checkpoint, "
        "restart and interval, such as mtbf=50000,checkpoint=60,restart=600. Those left out have defaults.",
    ),
    "P0809": CodeExplanation(
        "measured runs cannot be read",
        "`partc cluster fit` reads files with one JSON object a line: the --metrics of a package, which lies next to "
        "the file as a folder of the same name, or plans as `partc simulate` reads them, each with its model and the "
        "seconds of its measured step (step_seconds).",
    ),
    "P0811": CodeExplanation(
        "--fix names no decision, or a value that it cannot have",
        "--fix 'tp=4|8,zero=1' restricts what `partc plan` tries. The decisions are the sizes of pp, dp, cp and tp, "
        "order (of axes, slowest first: pp-dp-tp), microbatches, schedule, virtual_stages, zero, recompute, nodes "
        "(none, 8), bucket, loss_chunks and stage_calls (balanced, fitted or 9-8-8-9). Several values stand between "
        "bars.",
    ),
    "P0812": CodeExplanation(
        "no plan suits the ranks, the batch and the fixed decisions",
        "The product of the axes is the number of ranks; dp times microbatches divides the global batch; a pipeline "
        "stage holds at least one call of the model. Give a batch with more factors, another number of ranks, or fix "
        "less.",
    ),
    "P0813": CodeExplanation(
        "no plan fits into memory",
        "Every plan holds more than --memory on some rank, or does not compile. The message names the plan that comes "
        "closest, and what would make it fit.",
    ),
    "P0814": CodeExplanation(
        "the global batch is wrong",
        "--global-batch is a number of samples (512, 2K) or of tokens ('4M tokens', 4Mtok), where K and M are 2^10 and "
        "2^20. Tokens are whole sequences, whose length the model file decides. The model file's batch() reads the "
        "number of samples as its option `batch`.",
    ),
    "P0815": CodeExplanation(
        "a plan and an option decide the same",
        "`partc compile --plan FILE` takes the mesh and the other decisions from the file, and with `--mesh auto` the "
        "planner makes them; --fix restricts these. Options that a plan does not have, such as --seed and --lr, may be "
        "given with both.",
    ),
    "P0816": CodeExplanation(
        "--mesh auto and its options go together",
        "`partc compile --mesh auto --cluster SPEC` plans before it compiles. --cluster, --ranks, --global-batch, "
        "--memory, --fix and --max-seconds are those of `partc plan`, and mean nothing with a mesh of your own.",
    ),
}


def explanation(code: str) -> str:
    """The catalogue's text for a code. Raises PartcError P0002."""
    entry = CATALOGUE.get(code.strip().upper())
    if entry is None:
        raise PartcError("P0002", f"there is no error {code!r}", help="`partc explain` lists them all")
    return f"{code.strip().upper()}: {entry.title}\n\n{entry.text}"


def listing() -> str:
    """All codes with their titles, by area."""
    blocks = []
    for area, name in AREAS.items():
        lines = [f"  {code}  {entry.title}" for code, entry in CATALOGUE.items() if code.startswith(area)]
        if lines:
            blocks.append("\n".join([name, *lines]))
    return "\n\n".join(blocks)
