"""What `partc explain` says of packages (P05), output (P06) and the environment (P07)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Entry:
    """A code's meaning in a line, and what more there is to know."""

    title: str
    text: str


PACKAGES: Mapping[str, Entry] = {
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
        "a run or verification of no steps, or an option that verify does not take",
        "--steps is 1 or more. `partc verify` starts from the seed and keeps nothing: of train.py's options it takes "
        "those of the optimizer, such as --optimizer, --lr, --weight-decay, --clip, --accumulate and --warmup.",
    ),
    "P0505": Entry(
        "the package, or its single-device model, stopped with an error",
        "What it printed last is shown; the first rank that failed has the reason, the others stop because of it. A "
        "rank that dies, is stopped by a signal or never comes is named by the others, with what it and they were in.",
    ),
    "P0506": Entry(
        "a package without a readable account of its memory",
        "plan.json says under `memory` what ranks hold in a step; `partc memory` shows it. Packages of an older partc "
        "have none, nor have those that hold as much as numbers in the batch decide.",
    ),
    "P0521": Entry(
        "an option of train.py that cannot be",
        "Numbers are finite and in their range, which the message has; patterns name something; --resume alone "
        "continues what --save names. "
        "The seed, the optimizer and --accumulate of a training are its checkpoint's: leave them out with --resume. "
        "--lr may change.",
    ),
    "P0522": Entry(
        "a folder that has another training's checkpoints",
        "A run never writes over checkpoints. Continue the newest with --resume, or name another folder with --save; "
        "to go on from an older one, too, for the newer ones stand in the way.",
    ),
    "P0523": Entry(
        "there is no checkpoint to resume from",
        "--resume takes the folder that --save was given, and finds its newest whole checkpoint, or one of its "
        "folders step_00000300. `--save DIR --resume` starts at the beginning where DIR has none yet.",
    ),
    "P0524": Entry(
        "a damaged checkpoint",
        "Every file is held against the sizes and sha256 digests in manifest.json before anything is read. "
        "`--resume DIR` passes over damaged checkpoints and takes the newest whole one, `--resume DIR/step_...` "
        "refuses. A run that comes to the same step again moves the damaged one to step_....damaged.*.",
    ),
    "P0525": Entry(
        "a checkpoint of another model",
        "Names, shapes and element types of all parameters must be the plan's. Mesh, stages, microbatches, layouts and "
        "schedule may be others.",
    ),
    "P0526": Entry(
        "a checkpoint cannot be written",
        "The folder is full, not writable, or not the same on all ranks: they write to one folder, which the "
        "nodes share. The newest complete checkpoint is as it was.",
    ),
    "P0527": Entry(
        "a file of initial parameters that does not fit",
        "--init takes a state dict of the model as safetensors: a file, model.safetensors.index.json, or the folder of "
        "a Hugging Face model. Every parameter must be there with its shape, tied ones under any of their names, and "
        "nothing that the model doesn't know. Element types may be narrower (bf16 for f32), never wider.",
    ),
    "P0528": Entry(
        "the loss is not finite",
        "With --check-nans all ranks stop before the update when the loss is NaN or infinite, run the step again and "
        "name the first region that was given finite numbers and made others. Exit code 1.",
    ),
    "P0529": Entry(
        "TensorBoard is not installed",
        "train.py --tensorboard writes for it with torch.utils.tensorboard, which needs the tensorboard package: "
        "`pip install tensorboard`, or `pip install 'partc[tensorboard]'`. --metrics FILE holds the same numbers as "
        "lines of JSON and needs nothing.",
    ),
    "P0530": Entry(
        "the model file's data function fails",
        "train.py calls data(step) of model.py for every batch, with the options of -D that it takes. A package "
        "carries the Python files that the model file imports, not what these read: put data where every rank finds "
        "it, and name it with an option (`-D text=/data/book.txt`) or in an environment variable.",
    ),
    "P0531": Entry(
        "Triton is not installed",
        "The package has kernels in Triton (`--kernels triton`). PyTorch for CUDA brings it; elsewhere `pip install "
        "triton`, with which they run on CPUs too, slowly, to be checked. `--kernels aten` needs nothing.",
    ),
    "P0532": Entry(
        "a file of kernels' configurations cannot be used",
        "On its first run on a GPU a package with kernels in Triton times a few configurations of each (sizes of "
        "blocks, warps) and keeps the fastest in kernels/tuned.json, by GPU, version of Triton and kernel. --tuned "
        "FILE gives another file of that form; what it has for a kernel must be values of its CANDIDATES (see "
        "kernels/). --no-tuning keeps the package's own.",
    ),
    "P0533": Entry(
        "a step cannot be recorded as CUDA graphs",
        "train.py --cuda-graphs (the default of a package that was compiled with it) needs a GPU for each process, a "
        "step in which the host has no part (P0419), and nobody who looks into it: not --check-nans, not --trace. "
        "--no-cuda-graphs trains without.",
    ),
    "P0534": Entry(
        "CUDA refused to record a step",
        "Some operation of the step, one of the model's own perhaps, waits for the device or copies from the host. The "
        "message has CUDA's words. --no-cuda-graphs trains without.",
    ),
    "P0535": Entry(
        "the command line of train.py does not parse",
        "An option is unknown, lacks its value, or has one that it cannot have. `python train.py --help` lists them; "
        "`partc run DIR` takes the same.",
    ),
    "P0536": Entry(
        "the ranks cannot meet",
        "Processes find each other by the variables that torchrun sets: RANK, WORLD_SIZE, and MASTER_ADDR and "
        "MASTER_PORT of rank 0, which opens a store there unless the launcher holds it. Each rank is one process, and "
        "each job has a port of its own. A rank that does not come is named after 20 seconds; the others wait for it "
        "as long as --timeout says.",
    ),
    "P0537": Entry(
        "not enough memory",
        "The machine or its GPU had no memory left for a rank; the message says in which action. `partc memory DIR` "
        "has what ranks hold at most, and when. More ranks, --zero, --recompute, smaller microbatches and "
        "--loss-chunks make it less. Exit code 1.",
    ),
    "P0538": Entry(
        "a file of the run cannot be written",
        "--metrics, --tensorboard, --trace, --record and --report name places that a rank writes to. `partc run`, and "
        "train.py where all ranks are on one machine, try them before they start; a disk that fills up later stops "
        "the run, which --resume continues from its last checkpoint.",
    ),
    "P0539": Entry(
        "another run saves into the folder",
        "One run at a time may save into a folder. Every rank locks the file .lock there, which names the process of "
        "the run's rank 0 and its host; the lock ends with the processes, however they end, so that a killed run "
        "can be resumed at once, or after the seconds that its other ranks take to notice. The file itself may stay.",
    ),
    "P0540": Entry(
        "some ranks have a GPU of their own and others have none",
        "Every rank computes on a GPU that no other rank has, or all compute on CPUs: that of its place among its "
        "machine's processes (LOCAL_RANK), or the only one that its process sees (CUDA_VISIBLE_DEVICES, SLURM's "
        "--gpus-per-task). The message names a rank that sees none where rank 0 sees some, that has no GPU left, or "
        "that shares one. `train.py --device cpu` trains on CPUs, `--device cuda` refuses to.",
    ),
    "P0541": Entry(
        "a kernel for attention that this machine does not have",
        "train.py --attention names the kernel to prefer on GPUs: cudnn, flash3 (the package flash-attn-3, on GPUs of "
        "compute capability 9.0), flash, efficient, or blocks, which is plain operations. Without it the first of "
        "these that the GPU and torch have is taken, and train.py prints which, and why not the ones before it.",
    ),
    "P0542": Entry(
        "an operation has no deterministic algorithm",
        "`train.py --deterministic` has torch use algorithms that give the same bits in every run on the same GPUs, "
        "and fail where it has none. They cost time, not measured yet: cuDNN's attention, FlashAttention 3 and sums "
        "inside switches (NVLS) are left out, the backward pass of flash attention sums in order, indexed sums sort "
        "first. On CPUs, and in kernels of `--kernels triton`, sums have a fixed order anyway.",
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
    "P0606": Entry(
        "a package that was changed by hand",
        "files.sha256 in the package has the digest of every file that partc wrote; `sha256sum -c files.sha256` "
        "shows which differ. Compiling over them would lose the changes.",
    ),
    "P0607": Entry(
        "not a trace",
        "`partc trace` takes a folder that `train.py --trace DIR` wrote, with a file of the same run from every rank "
        "and the same steps in each; of a run on several machines, copy their files together. It also takes a "
        "package, and then shows the predicted step alone.",
    ),
    "P0608": Entry(
        "the trace is of another package",
        "A trace knows the digest of the plan.json that it was made with. The package given with --package has "
        "another: compile it again as it was, or leave --package out.",
    ),
    "P0609": Entry(
        "an example's name is taken",
        "`partc examples DIR` copies partc's example model files into DIR. Files that have other content are kept.",
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
