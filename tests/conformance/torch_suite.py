"""PyTorch's distributed tests, read from the installed wheel and prepared for one CPU backend.

Nothing of PyTorch is stored here: `load` parses torch's own distributed_test.py, rewrites the
syntax tree in memory and executes it. The caller sets BACKEND=gloo, WORLD_SIZE, TEMP_DIR and
INIT_METHOD in the environment first: upstream's guards read them while the module is executed.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
import types
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.testing._internal.common_distributed as common
import torch.testing._internal.distributed as wheel_package

# Upstream's guards (decorators) against running a test, with gloo and on the CPU only.
_ASKING_FOR_GPUS = {"skip_if_no_gpu", "skip_if_lt_x_gpu"}
LIFTED: dict[str, set[str]] = {
    "gpu": _ASKING_FOR_GPUS,
    "all": _ASKING_FOR_GPUS
    | {
        "skip_but_pass_in_sandcastle",
        "skip_but_pass_in_sandcastle_if",
        "unittest.skip",
        "unittest.skipIf",
        "require_backend_is_available",
    },
}
# With the value that replaces each call.
GPU_CALLS = {
    "torch.cuda.set_device": None,
    "torch.accelerator.set_device_index": None,
    "torch.cuda.synchronize": None,
    "torch.cuda.manual_seed": None,
    "torch.cuda.current_device": 0,
}
ACCELERATORS = ("cuda", "xpu", "hpu")
NCCL = ("'nccl'", "dist.backend.nccl")


@dataclass
class Subject:
    """What is tested."""

    backend: str = "gloo"
    imports: list[str] = field(default_factory=list)  # modules that must be imported first
    ddp: str | None = None  # "pkg.mod:Class" in the place of torch's DistributedDataParallel
    lift: str = "all"  # which of upstream's guards are ignored: none, gpu, all


def cpu_device(device: Any) -> Any:
    """The CPU in place of an accelerator; anything else (cpu, meta, a dtype, None) as it is."""
    kind = device.type if isinstance(device, torch.device) else device
    is_accelerator = isinstance(kind, str) and kind.split(":")[0] in ACCELERATORS
    return "cpu" if type(kind) is int or is_accelerator else device


def dotted(node: ast.AST) -> str:
    """The name `a.b.c` of such an expression, or of what is called in a call."""
    node = node.func if isinstance(node, ast.Call) else node
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def call(function: str, *arguments: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(function, ast.Load()), list(arguments), [])


class AnswerAsGloo(ast.NodeTransformer):
    """Makes every `BACKEND == ...` compare gloo, whichever backend the groups are made with."""

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        if dotted(node.left) == "BACKEND":
            node.left = ast.Constant("gloo")
        return self.generic_visit(node)


class OnCpu(ast.NodeTransformer):
    """Drops the lifted guards and moves GPU (and nccl) code to the CPU (and to BACKEND)."""

    def __init__(self, lift: str) -> None:
        self.lift = lift

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        guards = [d for d in node.decorator_list if dotted(d) not in LIFTED[self.lift]]
        # Upstream asks for 8 ranks where tests only form the group [1, 2].
        node.decorator_list = [
            call("require_world_size", ast.Constant(3))
            if self.lift == "all" and dotted(guard) == "skip_if_small_worldsize"
            else guard
            for guard in guards
        ]
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        name = dotted(node)
        method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        if name in GPU_CALLS:
            return ast.Constant(GPU_CALLS[name])
        if method == "cuda" and isinstance(node.func, ast.Attribute):
            return node.func.value  # x.cuda(...) -> x
        for keyword in node.keywords:
            self._move_keyword(keyword)
        if method == "to" or name in ("torch.device", "init_device_mesh"):  # the device comes first
            node.args[:1] = [call("cpu_device", argument) for argument in node.args[:1]]
        return node

    @staticmethod
    def _move_keyword(keyword: ast.keyword) -> None:
        if keyword.arg in ("device_ids", "output_device"):
            keyword.value = ast.Constant(None)
        elif keyword.arg == "device":
            keyword.value = call("cpu_device", keyword.value)
        elif keyword.arg == "backend" and ast.unparse(keyword.value).lower() in NCCL:
            keyword.value = ast.Name("BACKEND", ast.Load())


def substitute_ddp(target: str) -> None:
    """Puts the class named "pkg.mod:Class" wherever torch has bound DistributedDataParallel."""
    stock = torch.nn.parallel.DistributedDataParallel
    module_name, _, class_name = target.partition(":")
    ours = getattr(importlib.import_module(module_name), class_name)
    for module in [m for n, m in list(sys.modules.items()) if n.split(".")[0] == "torch"]:
        for name in [n for n, value in list(vars(module).items()) if value is stock]:
            setattr(module, name, ours)


def load(subject: Subject) -> tuple[Any, Any]:
    """Returns the test module, its groups made with the subject's backend, and its TestCase."""
    for name in subject.imports:
        importlib.import_module(name)
    if subject.ddp:
        substitute_ddp(subject.ddp)
    assert wheel_package.__file__
    path = Path(wheel_package.__file__).with_name("distributed_test.py")
    module: Any = types.ModuleType("torch_suite_tests")
    module.__file__, module.cpu_device = str(path), cpu_device
    sys.modules[module.__name__] = module  # tests pickle classes of this module
    tree = AnswerAsGloo().visit(ast.parse(path.read_text(), path))
    if subject.lift != "none":
        tree = OnCpu(subject.lift).visit(tree)
        one_each: Any = lambda size, _backend: {rank: [rank] for rank in range(size)}  # noqa: E731
        common.init_multigpu_helper = one_each
    code = compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)
    exec(code, vars(module))
    module.BACKEND = subject.backend  # upstream's guards have seen gloo, the tests see this
    bases = (module.TestDistBackend, module.DistributedTest._DistTestBase)
    return module, type("Tests", bases, {})


def names_used(code: types.CodeType) -> set[str]:
    nested = (names_used(c) for c in code.co_consts if isinstance(c, types.CodeType))
    return set(code.co_names).union(*nested)


def is_ddp_test(module: Any, test: str) -> bool:
    """Whether a test is about DDP: its own name says so, or it or a helper it calls uses DDP."""
    helpers = vars(module.DistributedTest._DistTestBase)
    seen: set[str] = set()
    todo = {test}
    while todo:
        name = todo.pop()
        if "ddp" in name.lower() or name == "DistributedDataParallel":
            return True
        seen.add(name)
        helper: Any = helpers.get(name)
        code = getattr(inspect.unwrap(helper), "__code__", None) if helper is not None else None
        todo |= (names_used(code) if code else set()) - seen
    return False


def test_names(module: Any, tests: Any, suite: str) -> list[str]:
    """The tests of the suite "ddp", or of "collectives", which is all others."""
    names = [name for name in dir(tests) if name.startswith("test")]
    return [name for name in names if is_ddp_test(module, name) == (suite == "ddp")]
