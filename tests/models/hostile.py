"""Names that would run, break out of a string or hide another name, wherever a model or its batch may have one."""

import torch
from torch import Tensor, nn

# Each leaves a file behind where it is executed; none has a dot, which names of modules may not have.
RUNS = 'open("executed", "w")'
PAYLOADS = (
    f'"]; {RUNS}; x = ["', f"']; {RUNS.replace(chr(34), chr(39))}; x = ['", f"' + str({RUNS}) + '", f'" + str({RUNS}) + "',
    f"\n{RUNS}\n", f"\r{RUNS}", f"\x0c{RUNS}", f"\x85{RUNS}", f"\u2028{RUNS}\u2028", f"{{{RUNS}}}", f'"""\n{RUNS}\n"""',
    f"'''\n{RUNS}\n'''", f'\\"; {RUNS} #', f"{{{{ {RUNS} }}}}", "{% raw %}", "$(touch executed)", "`touch executed`",
    "<script>alert(1)</script>", "; touch executed", f"`; {RUNS}; `", f"x) + str({RUNS}) + (x",
)  # fmt: skip
MARKS = (
    '5" screen', "a'b", "\"'", "\\", "a\\", "\\\\", '\\"', "\\x", "\\u12", "\\N{BELL}", "\\n", "`", '"""', "'''", "%s", "%(a)s",
    "{x}", "{{", "{0}", "{", "}", "(", ")", "[", "]", "# a", "a # b", " = ", " | ", " ; ", ", ", " -> ", ": f32[4]", "a,b", "a=b",
    "a for b in c if d", "|", "*", "?", "[!a]", "~", "!", "^", "-x", "--help", "/etc/passwd", "a/b", "@1", "a@1", "&amp;", "[red]",
)  # fmt: skip
CONTROLS = (
    "\0", "a\nb", "a\rb", "a\tb", "a\x1cb", "a\x85b", "a\u2028b", "a\u2029b", "\x1b[31m", "\x07", "\u202e", "\xa0", "\u3000",
    "\ue000", "\ufeff", " ", "  ", "\n",
)  # fmt: skip
LETTERS = (
    "X",
    "é",
    "a b",
    "a_b",
    "日本",
    "\U0001f600",
    "ﬁ",
    "fi",
    "²",
    "٣",
    "1",
    "01",
    "1e5",
    "-1",
    "_",
    "__",
    "n" * 300,
)
KEYWORDS = (
    "class",
    "self",
    "lambda",
    "match",
    "None",
    "True",
    "print",
    "len",
    "loss",
    "step",
    "data",
    "partc",
    "model_",
)
EMITTED = (
    "torch", "functional", "kernels", "comm", "p", "g", "saved", "kept", "left", "number", "batch", "received", "gradients",
    "Stage", "Saved", "Values", "Shard", "Received", "Comm", "Tensor", "F", "math", "next", "zip", "reversed", "range", "i",
    "name", "unit", "whole", "BLOCK", "block", "main", "head", "embed", "call", "return", "input", "param", "region", "program",
    "grad_x", "grad_weight", "own_grad_x", "x", "x_2", "loss_2", "x_full", "x_partial", "x_whole", "x_product", "linear", "out",
)  # fmt: skip
NAMES = (*PAYLOADS, *MARKS, *CONTROLS, *LETTERS, *KEYWORDS, *EMITTED)


class Layers(nn.Module):
    """A linear layer under each name."""

    def __init__(self) -> None:
        super().__init__()
        for number, name in enumerate(NAMES):
            self._modules[name] = nn.Linear(4, 4, bias=number % 8 == 0)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([layer(x) for layer in self._modules.values() if layer is not None]).tanh().sum(0)


class Stores(nn.Module):
    """A parameter and a buffer under each name, in modules of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.parameters_, self.buffers_ = nn.Module(), nn.Module()
        for name in NAMES:
            self.parameters_._parameters[name] = nn.Parameter(torch.randn(4) * 0.1)
            self.buffers_._buffers[name] = torch.randn(4) * 0.1

    def forward(self, x: Tensor) -> Tensor:
        weight = torch.stack([weight for weight in self.parameters_._parameters.values() if weight is not None])
        scale = torch.stack([scale for scale in self.buffers_._buffers.values() if scale is not None])
        return (x @ (weight * scale).T).tanh() @ weight


class Lists(nn.Module):
    """Equal layers in lists under names: their calls are loops, with formatted names."""

    def __init__(self) -> None:
        super().__init__()
        self.lists = nn.ModuleDict()
        for name in (PAYLOADS[0], PAYLOADS[4], PAYLOADS[9], '5" screen', "{x}", "a\\", "class", "grad_x", "é", "call"):
            self.lists.add_module(name, nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)))
        odd = nn.ModuleDict()
        for name in ("01", "02", "٣", "²", "1"):  # numbers that are not written as Python writes them
            odd[name] = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.lists["odd"] = odd

    def forward(self, x: Tensor) -> Tensor:
        for layers in self.lists._modules.values():
            for layer in layers._modules.values() if layers is not None else ():
                x = layer(x) if layer is not None else x
        return x


class Entries(nn.Module):
    """Reads the entries of a batch by position."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(count, 1, 1))

    def forward(self, entries: dict[str, Tensor]) -> Tensor:
        return self.second(self.first((torch.stack(list(entries.values())) * self.scale).sum(0)).tanh()).square().mean()


KINDS = {"layers": Layers, "stores": Stores, "lists": Lists}


def model(place: str) -> nn.Module:
    return Entries(len(NAMES) + 1) if place == "entries" else KINDS[place]()


def batch(place: str) -> dict[str, Tensor]:
    return {name: torch.randn(8, 4) for name in (("", *NAMES) if place == "entries" else ("x", "loss"))}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch) if isinstance(model, Entries) else (model(batch["x"]) - batch["loss"]).square().mean()
