"""Wrong model files: each gives its coded error at the user's line, and nothing is written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from partc.cli import main

PLAIN = """import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 1)

    def forward(self, x):
        h = torch.relu(self.up(x))
        return self.down(h).sum()

def model():
    return Net()

def batch():
    return {"x": torch.randn(4, 8)}
"""
OUT = "self.down(h).sum()"
NET = "return Net()"
BATCH = "torch.randn(4, 8)"
TRIPLE = """class Triple(torch.autograd.Function):
    @staticmethod
    def forward(c, x): c.mark_dirty(x); return x.mul_(2)
    @staticmethod
    def backward(c, g): return torch.autograd.grad(g, g)[0]

class Net"""
WORD = ("def forward(self, x)", "def forward(self, **kw)"), ("self.up(x)", "self.up(next(iter(kw.values())))")

Changes = tuple[tuple[str, str], ...]

# What is wrong -> the changes to the file above, the code, and the line where it says one.
CASES: dict[str, tuple[Changes, str, int | None]] = {
    # The file
    "a syntax error": ((("import torch\n", "import torch\n)\n"),), "P0202", 2),
    "wrong indentation": ((("import torch\n", "import torch\n  x = 1\n"),), "P0202", 2),
    "an import that fails": ((("import torch\n", "import torch\nimport nothing_here\n"),), "P0202", 2),
    "an exception at the top": ((("import torch\n", "import torch\n1 / 0\n"),), "P0202", 2),
    "an exit at the top": ((("import torch\n", "import torch\nraise SystemExit(0)\n"),), "P0202", 2),
    "no model()": ((("def model", "def network"),), "P0203", 1),
    "no batch()": ((("def batch", "def data"),), "P0203", 1),
    "model is a number": ((("def model():\n    return Net()", "model = 3"),), "P0203", 1),
    # What model() does
    "model() raises": (((NET, "return 1 / 0"),), "P0205", 15),
    "model() exits": (((NET, "raise SystemExit(3)"),), "P0205", 15),
    "model() returns nothing": (((NET, "Net()"),), "P0205", None),
    "model() returns a class": (((NET, "return Net"),), "P0205", None),
    "model() wants an argument": ((("def model()", "def model(n)"),), "P0205", None),
    "weights on cuda": ((("nn.Linear(8, 12)", "nn.Linear(8, 12, device='no_such_device')"),), "P0205", 7),
    "a lazy module": ((("nn.Linear(8, 12)", "nn.LazyLinear(12)"),), "P0205", None),
    "a quantized module": (
        ((NET, "return torch.ao.quantization.quantize_dynamic(Net(), {nn.Linear})"),), "P0205", None
    ),
    "a weight of a class with methods": (
        ((NET, "n = Net(); n.own = type('Own', (nn.Parameter,), {'twice': 2})(n.up.bias.data * 2); return n"),), "P0205", None
    ),
    "two weights in one memory": (
        ((NET, "n = Net(); n.twin = nn.Linear(8, 12); n.twin.weight.data = n.up.weight.data; return n"),), "P0205", None
    ),
    "weights that overlap": (((NET, "n = Net(); n.part = nn.Parameter(n.up.weight.data[3:]); return n"),), "P0205", None),
    "a buffer in a weight": (((NET, "n = Net(); n.register_buffer('seen', n.up.bias.data[:2]); return n"),), "P0205", None),
    "random weights kept in the constructor": (((NET, "n = Net(); n.most = n.up.weight.max().item(); return n"),), "P0205", None),
    "complex weights": ((("nn.Linear(8, 12)", "nn.Linear(8, 12, dtype=torch.complex64)"),), "P0206", 11),
    "an operation on complex numbers": (((OUT, "torch.fft.rfft(h).asin().abs().sum()"),), "P0209", 12),
    # What batch() makes
    "batch() raises": ((("return {", "return {}['no'] or {"),), "P0205", 18),
    "batch() returns nothing": ((("return {", "_ = {"),), "P0205", None),
    "batch() returns a number": (((f'{{"x": {BATCH}}}', "3"),), "P0205", None),
    "batch() returns an empty dict": (((f'{{"x": {BATCH}}}', "{}"),), "P0205", None),
    "a list in the batch": (((BATCH, "[1.0, 2.0]"),), "P0205", None),
    "text in the batch": (((BATCH, "'abc'"),), "P0205", None),
    "an array in the batch": (((BATCH, "torch.randn(4, 8).numpy()"),), "P0205", None),
    "a number for a name": ((('{"x":', "{3:"),), "P0205", None),
    "half a character for a name": ((('{"x":', '{"x\\ud800":'), *WORD), "P0205", None),
    "a sparse batch": (((BATCH, f"{BATCH}.to_sparse()"),), "P0205", None),
    "a batch without values": (((BATCH, "torch.randn(4, 8, device='meta')"),), "P0205", None),
    "an empty batch": (((BATCH, "torch.randn(0, 8)"),), "P0205", None),
    "a batch without a dimension": (((BATCH, "torch.ones(())"), ("self.up(x)", "self.up(x.expand(4, 8))")), "P0401", None),
    "a batch that does not divide": (((BATCH, "torch.randn(5, 8)"),), "P0401", None),
    "another name than forward's": ((('{"x":', '{"y":'),), "P0206", None),
    "another shape than forward's": (((BATCH, "torch.randn(4, 9)"),), "P0206", 11),
    "batch() wants an argument": ((("def batch()", "def batch(n)"),), "P0205", None),
    # What the loss is
    "a loss with a shape": (((".sum()", ""),), "P0208", None),
    "an integer loss": (((OUT, f"({OUT} > 0).long()"),), "P0208", None),
    "a complex loss": (((OUT, f"{OUT}.to(torch.complex64)"),), "P0208", None),
    "no loss at all": (((f"return {OUT}", OUT),), "P0206", None),
    "a number for a loss": (((OUT, "1.0"),), "P0206", None),
    "a detached loss": (((OUT, f"{OUT}.detach()"),), "P0217", None),
    "a mean of nothing": (((OUT, "self.down(h)[:, :0].mean()"),), "P0217", None),
    "a loss without weights": (((OUT, "x.sum()"),), "P0217", None),
    "all weights frozen": (((NET, "return Net().requires_grad_(False)"),), "P0217", None),
    "no weights at all": ((("nn.Linear(8, 12)", "nn.ReLU()"), ("nn.Linear(12, 1)", "nn.ReLU()")), "P0217", None),
    # What forward does
    "forward raises": (((OUT, "1 / 0"),), "P0206", 12),
    "forward asserts": ((("h = ", "assert x.shape[0] == 5, 'five'; h = "),), "P0206", 11),
    "forward exits": (((OUT, "exit()"),), "P0206", 12),
    "forward calls itself": ((("h = ", "h = self.forward(x); h = "),), "P0206", 11),
    "a loop over values": (((OUT, "h.sum() * len([1 for v in h.flatten() if v > 0])"),), "P0206", 12),
    "item()": (((OUT, "h.sum() * round(h.max().item())"),), "P0206", 12),
    "tolist()": (((OUT, "h.sum() * round(h.sum(0).tolist()[0])"),), "P0206", 12),
    "numpy()": (((OUT, "h.sum() * float(h.detach().numpy().sum())"),), "P0206", 12),
    "a mask for an index": (((OUT, "h[h > 0].diff().sum()"),), "P0206", 12),
    "unique()": (((OUT, "h.sum() + x.unique().sum()"),), "P0206", 12),
    "a move to another device": (((OUT, "h.to('no_such_device').sum()"),), "P0206", 12),
    "a collective of its own": (((OUT, "torch.distributed.all_reduce(h) or h.sum()"),), "P0206", 12),
    "a function that changes its operand": (
        (("class Net", TRIPLE), ("self.up(x)", "Triple.apply(self.up(x))")), "P0216", 6
    ),
    "a weight that forward begins to train": (
        (("self.down = nn", "self.up.weight.requires_grad_(False); self.down = nn"),
         ("h = ", "self.up.weight.requires_grad_(True); h = "), (OUT, f"({OUT}, self.up.weight.requires_grad_(False))[0]")), "P0225", 11,
    ),
    "a hook on a module's gradients": (
        ((NET, "n = Net(); n.up.register_full_backward_hook(lambda *_: None); return n"),), "P0216", None
    ),
    "a hook on a module that reads its result's gradient": (
        ((NET, "n = Net(); n.up.register_full_backward_hook(lambda m, i, o: (o[0].sum() * i[0],)); n.down.register_full_backward_hook(lambda m, i, o: (o[0].sum() * i[0],)); return n"),), "P0216", None
    ),
    "a hook on a gradient's sum": (
        ((NET, "n = Net(); n.up.weight.register_post_accumulate_grad_hook(lambda w: None); return n"),), "P0216", None
    ),
    "a hook that only reads": (((OUT, f"h.register_hook(lambda g: None) and {OUT}"),), "P0216", 12),
    "a hook behind a reader": (((OUT, f"(z := h.sin(), h.register_hook(lambda g: g * 2)) and {OUT} + z[0].sum()"),), "P0216", 12),
    "two hooks": (((OUT, f"(h.register_hook(lambda g: g * 2), h.register_hook(lambda g: g + 1)) and {OUT}"),), "P0216", 12),
    "gradients inside forward of batches of outputs": (
        ((OUT, "torch.autograd.grad(h, self.up.weight, h[None], is_grads_batched=True)[0].sum()"),), "P0216", 12
    ),
    "gradients inside forward without seeds": (((OUT, "torch.autograd.grad(h, self.up.weight)[0].sum()"),), "P0206", 12),
    "gradients inside forward of nothing": (((OUT, "torch.autograd.grad(h.sum(), self.down.weight)[0].sum()"),), "P0206", 12),
    "a list of views of weights": (
        (("self.up = nn", "self.rows = []; self.up = nn"), ("self.down = nn", "self.rows.append(self.up.bias.data[:1]); self.down = nn"),
         (OUT, f"({OUT}) * self.rows[0].sum()")), "P0211", 12,
    ),
    "a list of tensors that grows": (
        (("self.up = nn", "self.tables = [torch.ones(12)]; self.up = nn"),
         ("h = ", "self.tables = [*self.tables, x.mean(0)]; h = "), (OUT, f"({OUT}) * len(self.tables)")), "P0225", 11,
    ),
    "two buffers in one memory": (
        (("self.up = nn", "self.scale = torch.ones(12); self.first = self.scale[:2]; self.up = nn"),
         (OUT, f"({OUT}) * self.scale[1:].mul_(2).sum() * self.first.sum()")), "P0225", 12,
    ),
    "two entries of the batch in one memory": (
        (("self, x)", "self, x, y)"), ("h = ", "x[:, ::3] = 0; h = y.mean() * "),
         ('    return {"x": torch.randn(4, 8)}', '    whole = torch.randn(4, 9); return {"x": whole[:, :-1], "y": whole[:, 1:]}')), "P0225", 11,
    ),
    "a change of a tensor outside the model": (
        (("class Net", "MEAN = torch.zeros(12)\n\nclass Net"), (OUT, "self.down(h - MEAN.add_(1)).sum()")), "P0225", 14,
    ),
    "a change of a buffer outside the model": (
        (("class Net", "NORM = nn.BatchNorm1d(12)\n\nclass Net"), (OUT, "self.down(NORM(h) - NORM.running_mean).sum()")), "P0225", 14,
    ),
    "a plain attribute of another shape": (
        (("self.up = nn", "self.last = torch.ones(1); self.up = nn"),
         ("h = ", "h = self.last.mean() * "), (OUT, f"({OUT}, setattr(self, 'last', h.detach()))[0]")), "P0225", 11,
    ),
    "a constant that no module owns": (
        (("class Net", "LARGE = torch.rand(500, 12)\n\nclass Net"), (OUT, "(h @ LARGE.T).sum()")), "P0211", 14
    ),
}  # fmt: skip

NO_VALUES, PLAIN_FIX, PLAIN_RUN = "depends on the values of a tensor", "register_buffer", "in plain PyTorch"
LINEAR = "self.up = nn.Linear(8, 12)"

# What stops a trace -> the change, and what the cause and the help say about it.
CAUSES: dict[str, tuple[Changes, str, str]] = {
    "a branch": (((OUT, "sum(v for v in h.flatten() if v > 0)"),), f"{NO_VALUES}: `return sum(v for v in h.flatten() if v > 0)`", "torch.where"),
    "item()": (((OUT, "h.sum() * round(h.max().item())"),), NO_VALUES, "torch.where"),
    "a seed": (((OUT, "h.sum() * __import__('random').Random(x.argmax().item()).random()"),), "a function that needs its value", "on the tensor itself"),
    "a generator's seed": (((OUT, "h.sum() * torch.rand((), generator=torch.Generator().manual_seed(x.argmax().item()))"),), "a function that needs its value", "on the tensor itself"),
    "the places of a list": (((OUT, "sum([h.sum()] * 3 + [[h.mean()][i] for i in x[0].long().argsort()])"),), "IndexError: list index", "torch.stack(items)[i]"),
    "two tensors that may be equal": ((("        return self", "        while not torch.equal(h[0], h[1]): h = h.tanh()\n        return self"),), "torch.equal gives a Python value that depends on the values of tensors", "torch.where"),
    "a selection": (((OUT, "h[h > 0].diff().sum()"),), NO_VALUES, "mask"),
    "columns of a selection": (((OUT, "(h[:, h[0] > 0] @ torch.ones(3, 2)).sum()"),), "same reduction dim", "persistent=False"),
    "a size": (((OUT, "h.sum() * x.unique().to(torch.float64).sum()"),), "_unique2 depends on the values of a tensor", "mask"),
    "numpy()": (((OUT, "h.sum() * float(h.detach().numpy().sum())"),), "reads the values of a tensor", "NumPy"),
    "a plain attribute": (((LINEAR, f"{LINEAR}; self.t = torch.ones(12).requires_grad_()"), (OUT, "(h * self.t).sum()")), "attributes of the model: t", "nn.Parameter"),
    "an attribute below": (((LINEAR, f"{LINEAR}; self.up.t = self.up.bias.data"), (OUT, "(h * self.up.t).sum()")), "attributes of the model: up.t", PLAIN_FIX),
    "a device in forward": (((OUT, "(h + torch.ones(12, device='cuda')).sum()"),), "cpu and cuda:0 meet", "device= out"),
    "a wrong device": (((OUT, "h.to('no_such_device').sum()"),), "device", "devices out of the model"),
    "an operator that tensors do not have": (((OUT, "divmod(h, 2)[0].sum()"),), "for divmod(): 'Tensor' and 'int'", PLAIN_RUN),
    "shapes that differ": (((BATCH, "torch.randn(4, 9)"),), "same reduction dim", PLAIN_RUN),
    "a wrong view": (((OUT, "h.view(5, 5).sum()"),), "invalid for input of size 48", PLAIN_RUN),
    "a wrong index": (((OUT, "h[:, 20].sum()"),), "out of bounds", PLAIN_RUN),
    "a mask of another shape": (((OUT, "h[h[0] > 0].sum()"),), "the mask [12] at index 0 does not match", PLAIN_RUN),
    "an attribute that is not there": (((OUT, "self.nothing(h)"),), "has no attribute 'nothing'", PLAIN_RUN),
    "an error of the model's own": (((OUT, "[][len(h)]"),), "IndexError: list index out of range", PLAIN_RUN),
    "words of torch in it": ((("        h =", "        raise ValueError('a dtype of data-dependent u0')\n        h ="),), "ValueError: a dtype of data-dependent u0", PLAIN_RUN),
    "no end": ((("h = ", "h = self.forward(x); h = "),), "deeper than Python's recursion limit", "calls itself"),
    "another name": ((('{"x":', '{"y":'),), "unexpected keyword argument 'y'", "entries of batch()"),
    "no loss": (((f"return {OUT}", OUT),), "the model returns NoneType", "return a tensor"),
    "derivatives by torch.func": (((OUT, "torch.func.jacrev(torch.sin)(h[0]).sum()"),), "products with a Jacobian at once by torch.func", "torch.autograd.grad"),
    "nested tensors": (((OUT, "torch.nested.nested_tensor([h[0], h[1]]).sum()"),), "torch cannot trace the operation _nested", "dense"),
    "words that cannot be read": ((("class Net", "class Odd(Exception):\n    def __str__(self):\n        return 1 / 0\n    @classmethod\n    def throw(cls):\n        raise cls\n\nclass Net"), (OUT, "Odd.throw()")), "Odd", PLAIN_RUN),
    "a complex value": (((OUT, "torch.fft.rfft(h).asin().abs().sum()"),), "asin of complex tensors", "view_as_real"),
    "a quantized value": (((OUT, "torch.quantize_per_tensor(h, 0.1, 0, torch.qint8).dequantize().sum()"),), "torch.qint8", "P0209"),
    "a sparse value": (((OUT, "torch.sparse.mm(h.to_sparse(), torch.ones(12, 3)).sum()"),), "is a sparse_coo tensor", "dense"),
    "a loss of integers": (((OUT, "h.argmax(-1).sum()"),), "the loss is i64", "mean or sum"),
    "lengths of sequences": (
        ((LINEAR, f"{LINEAR}; self.gru = nn.GRU(1, 2, batch_first=True)"),
         (OUT, "self.gru(nn.utils.rnn.pack_padded_sequence(h[..., None], 3 + (h[:, 0] > 0), True, False))[0].data.sum()")), "reads the data of packed sequences", "mask them"
    ),
    "selected rows of examples": (((OUT, "(h[h > 0].reshape(4, -1) + h[:, :6]).sum()"),), "should be broadcastable to", "argsort"),
    "gradients in forward": (((OUT, "h.sum().backward() or h.sum()"),), "computes gradients itself", "differentiates"),
}  # fmt: skip

LOSSES = {
    "raises": ("def loss(model, batch):\n    raise RuntimeError('no')\n", "P0206", 21),
    "takes one argument": ("def loss(model):\n    return model(x=1)\n", "P0206", None),
    "returns nothing": ("def loss(model, batch):\n    model(**batch)\n", "P0206", None),
    "returns a number": ("def loss(model, batch):\n    return 1.0\n", "P0206", None),
    "exits": ("def loss(model, batch):\n    raise SystemExit\n", "P0206", 21),
}


def changed(changes: Changes) -> str:
    """The text of the right model file with replacements; fails if a replaced text is not there."""
    text = PLAIN
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return text


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("wrong", CASES)
def test_a_wrong_model_file(wrong: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes, code, line = CASES[wrong]
    refused(changed(changes), code, line, tmp_path, capsys)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("wrong", CAUSES)
def test_the_cause_is_named_in_three_lines(wrong: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    changes, cause, help = CAUSES[wrong]
    path = tmp_path / "net.py"
    path.write_text(changed(changes))
    assert main(["compile", str(path), "--mesh", "2", "-o", str(tmp_path / "build")]) == 2
    err = capfd.readouterr().err
    first, second, *more = err.splitlines()
    assert cause in first and help in second and not more, err
    assert ("values" in first) == (cause == NO_VALUES or "values" in cause), "a cause that is not the case"
    assert first.startswith(f"{path}:") or wrong in ("another name", "no loss", "a complex batch"), err


def test_an_error_in_one_microbatch_names_its_part_of_the_batch(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "net.py"
    path.write_text(
        changed(((OUT, "nn.functional.batch_norm(h, None, None, training=True).view(4, 12).square().sum()"),))
    )
    assert main(["compile", str(path), "--mesh", "1", "--microbatches", "2", "-o", str(tmp_path / "build")]) == 2
    assert "each of the 2 microbatches is a batch of its own" in capfd.readouterr().err


@pytest.mark.parametrize("wrong", LOSSES)
def test_a_wrong_loss(wrong: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, code, line = LOSSES[wrong]
    refused(f"{PLAIN}\n{text}", code, line, tmp_path, capsys)


def refused(text: str, code: str, line: int | None, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / "net.py"
    path.write_text(text)
    assert main(["compile", str(path), "--mesh", "2", "-o", str(folder / "build"), "--json"]) == 2
    out, err = capsys.readouterr()
    error = json.loads(out)["error"]
    assert error["code"] == code, err
    assert error["source"] == f"{path}:{line}" or line is None
    assert error["help"] or code == "P0205"
    assert "Traceback" not in err
    assert path.read_text() == text
    assert sorted(p.name for p in folder.iterdir() if p.name != "__pycache__") == ["net.py"]


def test_the_file_itself_is_right(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(PLAIN)
    assert main(["compile", str(tmp_path / "net.py"), "--mesh", "2", "-o", str(tmp_path / "build")]) == 0
