"""Tracing: model files and options, a program's records of its model, and errors that quote the user's line."""

from __future__ import annotations

import copy
import json
import textwrap
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import partc
from partc import passes
from partc.errors import PartcError
from partc.frontend.model_files.huggingface import model_source
from partc.frontend.model_files.model_file import load
from partc.frontend.state.caches import caches
from partc.frontend.state.shared_memory import module_pairs, shared_with
from partc.frontend.trace import Traced, trace_file, trace_model
from partc.ir.interpreter import evaluate_program
from partc.ir.mesh import Mesh
from partc.ir.program import Program

EXAMPLES = Path(__file__).parents[2] / "examples"
ONE = Mesh.parse("1")

MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width, bias):
        super().__init__()
        self.layer = nn.Linear(3, width, bias=bias)

    def forward(self, x, **rest):
        y = self.layer(x)
        {forward}
        return y.sum()

def model(width: int = 5, bias: bool = True, scale: float = 1.0):
    return Net(width, bias)

def batch(rows: int = 7, kind="random"):
    return {{"x": torch.randn(rows, 3)}}
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "net.py"
    path.write_text(textwrap.dedent(text))
    return path


def trace(path: Path, **options: str) -> Traced:
    return trace_file(path, options, mesh=ONE)


def refused(code: str, path: Path, **options: str) -> PartcError:
    with pytest.raises(PartcError) as failure:
        trace(path, **options)
    assert failure.value.code == code
    return failure.value


def line_of(path: Path, text: str) -> int:
    return next(number for number, line in enumerate(path.read_text().splitlines(), 1) if text in line)


def test_options_have_the_types_of_the_parameters_they_meet(tmp_path: Path) -> None:
    path = written(tmp_path, MODEL.format(forward="pass"))
    traced = trace(path, width="11", bias="false", rows="4")
    assert traced.options == {"width": 11, "bias": False, "rows": 4}
    assert traced.model_source == path.read_text()
    assert traced.program.value_types()["x"].shape == (4, 3)
    assert [(p.name, p.type.shape) for p in traced.program.parameters] == [("layer.weight", (11, 3))]


@pytest.mark.parametrize("options", [{"depth": "2"}, {"width": "wide"}, {"bias": "perhaps"}, {"scale": "x"}])
def test_wrong_options_are_refused(options: dict[str, str], tmp_path: Path) -> None:
    error = refused("P0204", written(tmp_path, MODEL.format(forward="pass")), **options)
    assert next(iter(options)) in str(error)


def test_what_is_no_model_file_is_refused(tmp_path: Path) -> None:
    refused("P0201", tmp_path / "absent.py")
    refused("P0202", written(tmp_path, "import nothing_of_this_name"))
    refused("P0203", written(tmp_path, "def model(): ..."))
    refused("P0205", written(tmp_path, "def model(): return 3\ndef batch(): return {}"))
    refused("P0205", written(tmp_path, MODEL.format(forward="pass") + "\ndef batch(): return [1]"))


def test_a_syntax_error_names_its_line(tmp_path: Path) -> None:
    path = written(tmp_path, "import torch\n\ndef model(:\n    pass")
    error = refused("P0202", path)
    assert error.source is not None and error.source.line == 3


@pytest.mark.parametrize(
    "forward", ["while y.sum() > 0: y = y - 1", "y = y[: int(y.sum())]", "y = y[y > 0].roll(1)", "y.numpy()"]
)
def test_graph_breaks_quote_the_line(forward: str, tmp_path: Path) -> None:
    path = written(tmp_path, MODEL.format(forward=forward))
    with pytest.raises(PartcError) as failure:
        passes.run(trace(path).program, {}, until="route")
    assert failure.value.code.startswith("P02")
    assert failure.value.source is not None
    assert failure.value.source.file.endswith("net.py")
    assert failure.value.source.line == line_of(path, forward)
    assert "Traceback" not in str(failure.value)


def test_errors_in_the_model_quote_the_line(tmp_path: Path) -> None:
    path = written(tmp_path, MODEL.format(forward="y = y @ y"))
    error = refused("P0206", path)
    assert error.source is not None and error.source.line == line_of(path, "y = y @ y")


def test_a_loss_is_one_number(tmp_path: Path) -> None:
    path = written(tmp_path, MODEL.format(forward="return y"))
    refused("P0208", path)
    program = trace(written(tmp_path, MODEL.format(forward="return torch.zeros(1) + y.sum()"))).program
    (loss,) = (value for value in program.values if value.name == program.loss)
    assert loss.type.shape == ()


class WithoutLength(tuple[int, ...]):
    def __len__(self) -> int:
        raise NotImplementedError


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.kinds = nn.Linear(3, 2), [WithoutLength((1, 2))]

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).square().mean()


def test_attributes_may_be_tuples_whose_class_has_no_length() -> None:
    """As the irreducible representations of e3nn."""
    assert trace_model(Named, lambda: {"x": torch.randn(4, 3)}, name="net", mesh=ONE).program.loss


class Tied(nn.Module):
    """Tied weights, a buffer, a frozen parameter and one that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 4)
        self.head = nn.Linear(4, 9, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(4), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(2))
        self.register_buffer("shift", torch.arange(4.0))

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.embed(ids) * self.scale + self.shift)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten())}


def tokens() -> Mapping[str, Tensor]:
    ids = torch.zeros(3, 5, dtype=torch.long)
    return {"ids": ids, "labels": ids}


def tied(precision: str = "fp32") -> Program:
    return trace_model(Tied, tokens, name="tied", mesh=ONE, precision=precision).program


def test_parameters_keep_names_ties_and_what_is_trained() -> None:
    found = {p.name: p for p in tied().parameters}
    assert set(found) == {"scale", "unused", "embed.weight", "shift"}
    assert found["embed.weight"].aliases == ("head.weight",)
    assert {name for name, p in found.items() if p.trainable} == {"embed.weight"}  # no gradient reaches `unused`
    assert tied().calls[0].params.count("embed.weight") == 1


def test_entries_that_are_one_tensor_stay_two_inputs() -> None:
    program = tied()
    assert program.inputs == ("ids", "labels")
    [cross_entropy] = [op for op in program.regions[0].forward.ops if op.name == "cross_entropy_loss"]
    assert "ids" not in set(cross_entropy.refs())


def test_floats_have_the_precision_and_integers_keep_theirs() -> None:
    types = {p.name: p.type.dtype for p in tied("fp64").parameters}
    assert set(types.values()) == {"f64"}
    assert tied("fp64").value_types()["ids"].dtype == "i64"
    assert tied("fp32").parameter("shift").type.dtype == "f32"


def test_fp64_is_fp64_throughout() -> None:
    class Careful(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x.float().softmax(-1, dtype=torch.float32).to(torch.float32) * torch.arange(3)).sum()

    program = trace_model(Careful, lambda: {"x": torch.zeros(2, 3)}, name="m", mesh=ONE, precision="fp64").program
    found = {value.type.dtype for op in program.regions[0].forward.ops for value in op.results}
    assert found == {"f64", "i64"}


def test_operations_name_their_module_and_line() -> None:
    program = trace_file(EXAMPLES / "mlp.py", {}, mesh=ONE).program
    lines = (EXAMPLES / "mlp.py").read_text().splitlines()
    [up] = [op for op in program.regions[0].forward.ops if op.source and op.source.module == "blocks.2.up"]
    assert up.source is not None
    assert up.source.file.endswith("examples/mlp.py")
    assert "self.up(" in lines[up.source.line - 1]


def test_eight_billion_parameters_take_seconds_and_no_memory() -> None:
    start = time.process_time()
    program = trace_file(EXAMPLES / "gpt.py", {"size": "8b", "batch": "16"}, mesh=ONE).program
    assert time.process_time() - start < 20
    sizes = [p.type.shape for p in program.parameters]
    assert sum(torch.Size(shape).numel() for shape in sizes) > 8e9


@pytest.mark.parametrize(
    ("config", "code"),
    [("{", "P0231"), ('{"hidden": 3}', "P0231"), ('{"model_type": "unheard_of"}', "P0232"),
     ('{"model_type": "unheard_of", "architectures": ["GPT2LMHeadModel"], "vocab_size": 9}', "P0232")],
)  # fmt: skip
def test_configurations_that_cannot_be_used(config: str, code: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(PartcError) as failure:
        trace_file(Path(f"hf:{tmp_path}/config.json"), {}, mesh=ONE)
    assert failure.value.code == code


def test_a_configuration_becomes_a_model_file(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    config = {"model_type": "gpt2", "vocab_size": 50, "n_embd": 12, "n_layer": 2, "n_head": 2, "n_positions": 9}
    still = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    (tmp_path / "config.json").write_text(json.dumps(config | still))
    with pytest.raises(PartcError, match=f"P0204: hf:{tmp_path}/config.json has no option 'wide'"):
        trace_file(Path(f"hf:{tmp_path}/config.json"), {"wide": "3"}, mesh=ONE)
    traced = trace_file(Path(f"hf:{tmp_path}/config.json"), {"batch": "3", "seq": "7"}, mesh=ONE)
    assert traced.program.value_types()["input_ids"].shape == (3, 7)
    assert traced.program.parameter("transformer.wte.weight").aliases == ("lm_head.weight",)
    path = written(tmp_path, traced.model_source)
    again = trace_file(path, {"batch": "3", "seq": "7"}, mesh=ONE).program
    assert again.parameters == traced.program.parameters


ORTHOGONAL = """
import torch
from torch import nn
from torch.nn.utils import prune

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        wrap = nn.utils.parametrizations.orthogonal
        self.up, self.down = wrap(nn.Linear(6, 6), orthogonal_map="cayley"), wrap(nn.Linear(6, 6))
        self.last = nn.utils.spectral_norm(nn.Linear(6, 6))
        prune.l1_unstructured(self.down, "bias", amount=2)
        self.memory = nn.LSTM(6, 6)
    def forward(self, x):
        x, _ = self.memory(x)
        return (self.last(self.down(self.up(x).tanh())) - x.sin()).square().mean()

def model(): return Net()
def batch(): return {"x": torch.randn(8, 6)}
"""


def test_constructors_that_read_weights(tmp_path: Path) -> None:
    """Also next to modules that keep lists of their weights."""
    package = partc.compile(str(written(tmp_path, ORTHOGONAL)), mesh="dp=2", precision="fp64")
    assert package.verify(steps=2).ok


class Shifted(nn.Module):
    """Colours whose mean the constructor assigns, as models of super-resolution do."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.layer = nn.Linear(3, 3).requires_grad_(False), nn.Linear(3, 3)
        self.shift.bias.data = torch.Tensor([-0.4, -0.5, -0.6])

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.shift(x)).square().mean()


def test_constructors_that_assign_values() -> None:
    assert partc.compile(Shifted, {"x": torch.randn(4, 3)}, mesh="dp=2", precision="fp64").verify(steps=2).ok


@pytest.mark.parametrize(
    ("tensor", "kind"),
    [
        ("torch.eye(3).to_sparse()", "sparse"),
        ("torch.eye(4).to_sparse_csr()", "sparse"),
        ("torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])", "nested"),
        ("torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)", "quantized"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_tensors_that_are_not_dense_are_refused_by_name(tensor: str, kind: str, tmp_path: Path) -> None:
    source = f"""
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.turn = nn.Linear(3, 3)
        with torch.device("cpu"):
            self.register_buffer("graph", {tensor})
    def forward(self, x): return self.turn(x).sum()

def model(): return Net()
def batch(): return {{"x": torch.randn(4, 3)}}
"""
    error = refused("P0205", written(tmp_path, source))
    assert f"graph of model() is {kind}" in error.cause


def test_weights_side_by_side_in_one_memory_are_no_ties() -> None:
    net = torch.nn.Module()
    whole = torch.randn(6, 8)
    net.left, net.right = (torch.nn.Parameter(x) for x in whole.split([3, 5], dim=1))
    net.register_buffer("mean", torch.zeros(4)), net.register_buffer("again", net.mean[:2])
    assert shared_with(module_pairs({"": net})) is None
    net.corner = torch.nn.Parameter(whole[:2, 2:4])
    assert shared_with(module_pairs({"": net})) == ("left", "corner")


CACHED = """
import functools
from types import FunctionType
import torch
from torch import nn

class Absent:
    def __getattr__(self, name): raise ImportError("an optional package is not installed")

absent = Absent()

def once(function):
    kept = functools.lru_cache(function)
    return lambda *given: kept(*given)

@functools.lru_cache
def ramp(size): return torch.arange(float(size)).repeat(2, 1).sum(0)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.turn = nn.Linear(64, 64)
    @once
    def places(self, size): return torch.full((4, size), 2.0).mean(0)
    def forward(self, x):
        h = self.turn(x) + ramp(64) * self.places(64)
        return (h - h.mean(0)).square().mean()

def model(): return Net()
def batch(): return {"x": torch.randn(8, 64)}
"""


def test_the_caches_of_functions_are_found(tmp_path: Path) -> None:
    """One cache hides behind a method's decorator, another one stands next to the class. A second trace must not get
    tensors of the first one from them.

    The search reads no attributes of other values: those of a class may be descriptors, those of a lazy import raise.
    """
    file = written(tmp_path, CACHED)
    net = load(file, {}).model()
    net(torch.ones(8, 64))
    found = caches(net.modules(), ())
    assert [cache.cache_info().currsize for cache in found] == [1, 1]
    for cache in found:
        cache.cache_clear()
    assert {cache.cache_info().currsize for cache in caches(net.modules(), ())} == {0}


SCRIPTED = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.turn = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
    def forward(self, x):
        for _ in range(2):
            x = torch.tanh(self.norm(self.turn(x)))
        return x.square().mean()

def model(): return torch.jit.script(Net())
def batch(): return {"x": torch.randn(8, 6)}
"""


@pytest.mark.filterwarnings("ignore")
def test_a_model_that_torchscript_compiled(tmp_path: Path) -> None:
    assert partc.compile(str(written(tmp_path, SCRIPTED)), mesh="dp=2", precision="fp64").verify(steps=2).ok


RETURNED: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "to": lambda h, w: h.to(w.dtype).contiguous(),
    "copy": lambda h, w: h.to(w.dtype, copy=True),
    "type_as": lambda h, w: h.type_as(w),
    "dropout": lambda h, w: F.dropout(h, 0.5, training=False),
    "real": lambda h, w: torch.real(+h),
    "view": lambda h, w: torch.atleast_2d(h).view(h.shape),
    "broadcast": lambda h, w: torch.broadcast_tensors(w[0], h)[1],
}


@pytest.mark.parametrize("form", RETURNED)
def test_a_tensor_keeps_its_gradient_where_an_operation_under_no_grad_returns_it(form: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.below, self.above = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            h = self.below(x).sin()
            with torch.no_grad():
                same = RETURNED[form](h, self.above.weight)
                scale = same.mean()
            return (self.above(h) * same + scale).square().mean()

    net, x = Net().double(), torch.randn(4, 6, dtype=torch.float64)
    program = trace_model(Net, lambda: {"x": x}, name="net", mesh=ONE, precision="fp64").program
    weights = list(net.parameters())
    mine, eager = (torch.autograd.grad(loss, weights) for loss in (
        evaluate_program(passes.run(program, {}, until="normalize")[-1].program, {"x": x}, dict(net.named_parameters())),
        net(x),
    ))  # fmt: skip
    torch.testing.assert_close(mine, eager)


SOUNDS = {
    "conv_dim": [8, 8], "conv_kernel": [10, 3], "conv_stride": [5, 2], "num_feat_extract_layers": 2, "hidden_size": 16,
    "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2, "classifier_proj_size": 8, "vocab_size": 20,
}  # fmt: skip
WORDS = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 50}
BOTH_SIDES = {
    "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "vocab_size": 50, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip
PICTURES = {
    "hidden_sizes": [8, 16], "depths": [1, 1], "num_encoder_blocks": 2, "num_attention_heads": [1, 2],
    "sr_ratios": [2, 1], "patch_sizes": [7, 3], "strides": [4, 2], "mlp_ratios": [2, 2], "decoder_hidden_size": 8,
    "image_size": 32,
}  # fmt: skip
SQUARES = {**WORDS, "image_size": 32, "patch_size": 8, "encoder_stride": 8}
MASKED_PICTURES = {"decoder_hidden_size": 16, "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 2}
SERIES = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "context_length": 8, "lags_sequence": [1, 2],
          "num_time_features": 2}  # fmt: skip
SIGHT = {**SQUARES, "model_type": "clip_vision_model", "num_hidden_layers": 2}
GRIDS = {
    "text_config": {**WORDS, "num_key_value_heads": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}},
    "vision_config": {"depth": 1, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "patch_size": 14},
    "image_token_id": 49, "vision_start_token_id": 48, "video_token_id": 47,
}  # fmt: skip
SEGMENTS = {
    "backbone_config": {"model_type": "swin", "embed_dim": 8, "depths": [1, 1, 1, 1], "num_heads": [1, 1, 2, 2], "window_size": 2,
                        "image_size": 32, "out_features": ["stage1", "stage2", "stage3", "stage4"]},
    "decoder_config": {"model_type": "detr", "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "num_queries": 5,
                       "encoder_attention_heads": 2, "decoder_attention_heads": 2},
    "fpn_feature_size": 32, "mask_feature_size": 32, "image_size": 64,
}  # fmt: skip
CONFIGURED: Mapping[str, tuple[str, dict[str, object]]] = {
    "BertForMultipleChoice": ("bert", WORDS),
    "BertForNextSentencePrediction": ("bert", WORDS),
    "BartForSequenceClassification": ("bart", BOTH_SIDES),
    "WhisperForConditionalGeneration": ("whisper", {**BOTH_SIDES, "max_source_positions": 8, "num_mel_bins": 4}),
    "Wav2Vec2ForSequenceClassification": ("wav2vec2", SOUNDS),
    "HubertForCTC": ("hubert", SOUNDS),
    "SegformerForSemanticSegmentation": ("segformer", PICTURES),
    "GLPNForDepthEstimation": ("glpn", PICTURES),
    "ViTForMaskedImageModeling": ("vit", SQUARES),
    "VideoMAEForVideoClassification": ("videomae", {**SQUARES, "num_frames": 4, "tubelet_size": 2}),
    "Wav2Vec2ForXVector": ("wav2vec2", {**SOUNDS, "tdnn_dim": [8, 8, 8, 8, 8], "xvector_output_dim": 8}),
    "WavLMForAudioFrameClassification": ("wavlm", {**SOUNDS, "num_labels": 3}),
    "BertForPreTraining": ("bert", WORDS),
    "AlbertForPreTraining": ("albert", WORDS),
    "ElectraForPreTraining": ("electra", WORDS),
    "ViTMAEForPreTraining": ("vit_mae", {**SQUARES, **MASKED_PICTURES}),
    "Wav2Vec2ForPreTraining": ("wav2vec2", {**SOUNDS, "codevector_dim": 8, "proj_codevector_dim": 8}),
    "YolosForObjectDetection": ("yolos", {**SQUARES, "image_size": [32, 32], "num_detection_tokens": 5}),
    "MaskFormerForInstanceSegmentation": ("maskformer", SEGMENTS),
    "TimeSeriesTransformerForPrediction": ("time_series_transformer", {**SERIES, "prediction_length": 4}),
    "PatchTSTForPrediction": ("patchtst", {**BOTH_SIDES, "context_length": 64, "num_input_channels": 2}),
    "PatchTSTForClassification": ("patchtst", {"d_model": 16, "context_length": 64, "num_targets": 3}),
    "PatchTSMixerForPretraining": ("patchtsmixer", {"d_model": 8, "context_length": 64, "num_input_channels": 2}),
    "BartModel": ("bart", BOTH_SIDES),
    "ConvNextModel": ("convnext", {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "image_size": 32}),
    "HubertModel": ("hubert", SOUNDS),
    "LlavaForConditionalGeneration": (
        "llava",
        {"text_config": {**WORDS, "model_type": "llama"}, "vision_config": SIGHT, "image_token_id": 49},
    ),
    "Qwen2VLForConditionalGeneration": ("qwen2_vl", GRIDS),
    "LightOnOcrForConditionalGeneration": (
        "lighton_ocr",
        {
            "text_config": {**WORDS, "model_type": "qwen3", "num_key_value_heads": 2},
            "vision_config": {**SIGHT, "model_type": "pixtral"},
            "image_token_id": 49,
        },
    ),
    "VivitModel": ("vivit", {**SQUARES, "num_frames": 4, "tubelet_size": [2, 8, 8]}),
    "LlavaModel": ("llava", {"text_config": {**WORDS, "model_type": "llama"}, "vision_config": SIGHT}),
    "ASTForAudioClassification": ("audio-spectrogram-transformer", {**WORDS, "max_length": 32, "num_mel_bins": 16}),
}


@pytest.mark.parametrize("architecture", CONFIGURED)
def test_an_architecture_takes_the_batch_that_is_made_for_it(architecture: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    kind, config = CONFIGURED[architecture]
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**config, "model_type": kind, "architectures": [architecture]}))
    made = load(written(tmp_path, model_source(f"hf:{path}", batch=2, seq=8)), {})
    torch.manual_seed(0)  # of so few words, some batches have none with a label
    batch, model = made.batch(), made.model()
    assert (model(**batch)["loss"] if made.loss is None else made.loss(model, batch)).isfinite()


def test_an_architecture_that_transformers_cannot_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")

    def missing(_: object, name: str) -> object:
        raise ModuleNotFoundError(f"Could not import module {name!r}")

    monkeypatch.delattr(transformers, "ViTForImageClassification", raising=False)
    monkeypatch.setattr(type(transformers), "__getattr__", missing)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "vit", "architectures": ["ViTForImageClassification"]}))
    with pytest.raises(PartcError, match=r"P0233.*cannot import ViTForImageClassification"):
        model_source(f"hf:{path}")


@pytest.mark.parametrize(
    ("kind", "found"), [("qwen3", "Qwen3ForCausalLM"), ("bert", "BertForMaskedLM"), ("clip", "CLIPModel"),
                        ("whisper", "WhisperForConditionalGeneration"), ("imagegpt", "")],
)  # fmt: skip
def test_a_configuration_without_architectures_gets_that_of_its_type(kind: str, found: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": kind, "num_mel_bins": 4, "max_source_positions": 8, "vocab_size": 9})
    )
    if found:
        assert f"transformers.{found}(config)" in model_source(f"hf:{tmp_path}/config.json")
    else:
        with pytest.raises(PartcError, match="P0232"):
            model_source(f"hf:{tmp_path}/config.json")


class Low(nn.Parameter):
    """A class that marks weights."""

    group: str


class ByPointer(nn.Module):
    """Asks for the memory of its weights, and for the types and classes of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.c.weight = self.a.weight
        self.b.bias = Low(torch.ones(4))
        weights = self.a.weight, self.b.weight, self.c.weight
        self.distinct = len({x.data_ptr() for x in weights}) + len({x.untyped_storage().data_ptr() for x in weights})

    def get_extra_state(self) -> int:
        return self.distinct

    def forward(self, x: Tensor) -> Tensor:
        plain = type(x) is Tensor and type(self.a.weight) is nn.Parameter and self.a.weight.__class__ is nn.Parameter
        plain = plain and isinstance(self.b.bias, Low) and type(self.b.bias) is Low and not isinstance(self.a.bias, Low)
        plain = plain and type(self.a(x).tanh().grad_fn).__name__ == "TanhBackward0"
        return (self.c(self.b(self.a(x))) * self.distinct * (1.0 if plain else 3.0)).square().mean()


def test_memory_and_types_of_weights_without_values() -> None:
    net, x = ByPointer().double(), torch.randn(4, 4, dtype=torch.float64)
    traced = trace_model(ByPointer, lambda: {"x": x}, name="net", mesh=ONE, precision="fp64")
    assert traced.assumed == (
        "Checkpoints and exports leave out _extra_state, the extra state of ByPointer: load them with strict=False.",
    )
    weights = dict(net.named_parameters(remove_duplicate=False))
    found = evaluate_program(passes.run(traced.program, {}, until="normalize")[-1].program, {"x": x}, weights)
    torch.testing.assert_close(found, net(x))


class ByClass(nn.Module):
    """Asks for the classes of tensors in every way that Python has, and copies tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Parameter(torch.ones(4))
        self.a.bias = Low(torch.ones(4))
        self.register_buffer("kept", torch.full((4,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x.as_subclass(Tensor)).as_subclass(torch.Tensor)
        before, shared = copy.deepcopy(self.kept), copy.copy(self.kept)
        self.kept.mul_(1.5)
        asked = (
            h.__class__ is Tensor,
            x.__class__ in (Tensor,),
            x[0].__class__.__name__ == "Tensor",
            self.kept.__class__ is type(x),
            self.b.__class__ is nn.Parameter,
            not isinstance(h, nn.Parameter),
            copy.deepcopy(self.a.bias).__class__ is Low,
            type(copy.copy(self.a.bias)) is nn.Parameter,
        )
        for place, true in enumerate(asked):
            h = h * (1.5 + place) if true else h.sin()
        return (h * before + shared * self.b).square().mean()


class WithFrozenCopies(nn.Module):
    """Forward copies a layer that has two names; an export passes a stand-in of such a layer to forward."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.b = self.a

    def forward(self, x: Tensor) -> Tensor:
        held, same = copy.deepcopy(self.b), copy.copy(self.b)
        for parameter in held.parameters():
            parameter.requires_grad = False
        return (held(x).sin() * same(x) + self.a(x)).square().mean()


def test_forward_may_copy_layers_of_several_names() -> None:
    net, x = WithFrozenCopies().double(), torch.randn(4, 4, dtype=torch.float64)
    traced = trace_model(WithFrozenCopies, lambda: {"x": x}, name="net", mesh=ONE, precision="fp64")
    program = passes.run(traced.program, {}, until="normalize")[-1].program
    weights = {name: y.detach().requires_grad_() for name, y in net.named_parameters()}
    found = evaluate_program(program, {"x": x}, weights)
    torch.testing.assert_close(found, net(x))
    mine, its = torch.autograd.grad(found, list(weights.values())), torch.autograd.grad(net(x), list(net.parameters()))
    torch.testing.assert_close(mine, its)


def test_classes_of_tensors_are_those_of_eager_code() -> None:
    net, x = ByClass().double(), torch.randn(4, 4, dtype=torch.float64)
    traced = trace_model(ByClass, lambda: {"x": x}, name="net", mesh=ONE, precision="fp64")
    weights = {name: y.detach().clone() for name, y in (*net.named_parameters(), *net.named_buffers())}
    found = evaluate_program(passes.run(traced.program, {}, until="normalize")[-1].program, {"x": x}, weights)
    torch.testing.assert_close(found, net(x))
