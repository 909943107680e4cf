"""``gradsync-run``: the command itself, what it does to the processes below it, and trainers of
others that run under it with no change."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Daemon, find_daemon

from gradsync import _attach, _run

DEADLINE_S = 120.0

# What the installed command does, which need not be in PATH.
_RUN = [sys.executable, "-c", "from gradsync._run import main; main()"]
_OURS = "gradsync.torch.distributed.DistributedDataParallel"
_TORCHS = "torch.nn.parallel.distributed.DistributedDataParallel"


@dataclass
class Ended:
    status: int
    out: str
    err: str


def execute(*command: str | Path, **environment: str) -> Ended:
    """Runs a command to its end, of which it may have any."""
    process = subprocess.Popen(
        [str(word) for word in command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        raise AssertionError(f"{command} did not end\n{out}\n{err}") from None
    return Ended(process.returncode, out, err)


def run(*command: str | Path, **environment: str) -> Ended:
    return execute(*_RUN, *command, **environment)


def python(code: str, *options: str, **environment: str) -> Ended:
    """Python under gradsync-run."""
    return run(sys.executable, *options, "-c", code, **environment)


# ---- The command line ----------------------------------------------------------------------------


def test_help_says_what_it_is_for() -> None:
    ended = run("--help")
    assert ended.status == 0
    assert "gradsync-run torchrun --nproc-per-node 2 train.py" in ended.out


def test_the_command_is_installed() -> None:
    command = Path(sys.executable).with_name("gradsync-run")
    assert execute(command, "--", "sh", "-c", "exit 3").status == 3


@pytest.mark.parametrize(
    ("command", "status", "text"),
    [
        ([], 2, "gradsync-run: error: no COMMAND is given"),
        (["--"], 2, "no COMMAND is given"),
        (["--wrong", "true"], 2, "unrecognized arguments: --wrong"),
        (["no-such-command"], 127, "gradsync-run: no-such-command: No such file or directory"),
        (["./no/such/train.py"], 127, "gradsync-run python ./no/such/train.py"),
        (["/"], 126, "gradsync-run: /: Permission denied"),
        (["python3", "-I", "train.py"], 2, "python3 with -I does not read PYTHONPATH"),
    ],
)
def test_wrong_command_lines_are_told(command: list[str], status: int, text: str) -> None:
    ended = run(*command)
    assert (ended.status, ended.out) == (status, "")
    assert text in ended.err


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("python -I train.py", "-I"),
        ("/usr/bin/python3.11 -uE -m torch.distributed.run", "-E"),
        ("python3 -W ignore -X dev -Wdefault -S train.py", "-S"),
        ("python --check-hash-based-pycs always -BI -c pass", "-I"),
        ("python train.py -I", None),
        ("python -mtrain -I", None),
        ("python -um train -E", None),
        ("python -W -I train.py", None),
        ("python -XI train.py", None),
        ("python - -S", None),
        ("python -- -S", None),
        ("python", None),
        ("torchrun -I", None),
    ],
)
def test_options_that_would_detach_python_are_recognised(command: str, option: str | None) -> None:
    assert _run.option_that_detaches(command.split()) == option


def test_the_command_takes_the_place_of_gradsync_run() -> None:
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    command = [*_RUN, sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert int(process.stdout.readline()) == process.pid
        process.terminate()
        assert process.wait(10) == -signal.SIGTERM


@pytest.mark.parametrize(("code", "status"), [("exit 7", 7), ("kill -PIPE $$", -signal.SIGPIPE)])
def test_the_status_is_the_commands_own(code: str, status: int) -> None:
    assert run("sh", "-c", code).status == status


def test_the_paths_of_the_environment_are_kept(tmp_path: Path) -> None:
    entries = f"{tmp_path}{os.pathsep}/elsewhere"
    show = ["sh", "-c", 'echo "$PYTHONPATH"']
    once = run(*show, PYTHONPATH=entries).out.strip()
    assert once.split(os.pathsep)[1:] == entries.split(os.pathsep)
    assert run(*_RUN, *show, PYTHONPATH=entries).out.strip() == once
    assert _run.environment({"PYTHONPATH": ""}) == _run.environment({})


# ---- Every Python process below it ---------------------------------------------------------------


def test_the_sitecustomize_in_its_way_is_run(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("value = 'shadowed'")
    # Another installation's in between does not lead in circles.
    other = shutil.copytree(Path(_run.__file__).with_name("_site"), tmp_path / "other")
    for entries in (str(tmp_path), f"{other}{os.pathsep}{tmp_path}"):
        code = "import sitecustomize; print(sitecustomize.value); import torch"
        ended = python(code, PYTHONPATH=entries)
        assert (ended.status, ended.out, ended.err) == (0, "shadowed\n", "")


def test_errors_of_that_sitecustomize_are_told_as_ever(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("raise ValueError('its own')")
    code = "print('runs')"
    ended = python(code, PYTHONPATH=str(tmp_path))
    alone = execute(sys.executable, "-c", code, PYTHONPATH=str(tmp_path))
    # gradsync-run is such a process itself.
    assert ended == Ended(alone.status, alone.out, 2 * alone.err)
    assert "ValueError: its own" in alone.err


def test_processes_without_torch_import_next_to_nothing() -> None:
    code = "import sys; print(*sys.modules)"
    more = set(python(code).out.split()) - set(execute(sys.executable, "-c", code).out.split())
    light = {"sitecustomize", "__future__", "importlib", "warnings"}
    assert "sitecustomize" in python(code).out
    assert {name for name in more if not name.startswith("importlib.")} <= light


def test_processes_that_only_import_torch_do_not_import_ours() -> None:
    code = "import sys, torch.distributed.run; print('gradsync.torch' in sys.modules)"
    assert python(code).out == "False\n"
    assert python(f"from torch.nn.parallel import *; {code}").out == "True\n"


def test_an_interpreter_without_gradsync_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("")
    other = Path(sys.base_prefix) / "bin" / "python3"
    ended = run(other, "-c", "import torch; print('runs')", PYTHONPATH=str(tmp_path))
    assert (ended.status, ended.out) == (0, "runs\n")
    assert f"{other} are left as they are: No module named 'gradsync'" in ended.err


# ---- Ranks ---------------------------------------------------------------------------------------

# What each script begins with. The result, of rank 0, is a file.
_PRELUDE = """
import json, os, subprocess, sys
import torch
import torch.distributed as dist
from torch import nn

def classes(wrapper):
    return [f"{c.__module__}.{c.__qualname__}" for c in type(wrapper).__mro__]

def reductions():
    '''What the daemon itself has counted for this job.'''
    def ask(*question):
        command = [os.environ["GRADSYNCCTL"], *question, "--json"]
        return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    names = [job["name"] for job in ask("jobs").get("jobs", [])]
    mine = [ask("job", n) for n in names if n.startswith(os.environ["GRADSYNC_JOB"] + "-")]
    return sum(int(bucket.get("reductions", 0))
               for job in mine for group in job["groups"] for bucket in group.get("buckets", []))

def report(wrapper, **more):
    if dist.get_rank() == 0:
        torch.save({
            "backend": dist.get_backend(),
            "classes": classes(wrapper),
            "reductions": reductions(),
            "parameters": [p.detach().clone() for p in wrapper.parameters()],
        } | more, sys.argv[1])
    dist.barrier()
"""

_TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


class Trainer:
    """Runs one script, attached and alone."""

    def __init__(self, daemon: Daemon, folder: Path) -> None:
        self.folder = folder
        self._environment = {
            "GRADSYNC_SOCKET": daemon.socket,
            "GRADSYNCCTL": str(Path(find_daemon()).with_name("gradsyncctl")),
            "GRADSYNC_JOB": f"attach-{folder.name}",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        self.err = ""

    def __call__(
        self,
        script: str,
        *,
        attached: bool = True,
        before: str = "",
        launcher: tuple[str, ...] = _TORCHRUN,
    ) -> dict[str, Any]:
        """Its result. Lines `before` come before anything else."""
        file, result = self.folder / "train.py", self.folder / "result.pt"
        result.unlink(missing_ok=True)
        file.write_text(before + _PRELUDE + script)
        start = run if attached else execute
        ended = start(*launcher, file, result, **self._environment)
        assert ended.status == 0, ended.out + ended.err
        self.err = ended.err
        loaded: dict[str, Any] = torch.load(result)
        return loaded


@pytest.fixture
def train(daemon: Daemon, tmp_path: Path) -> Trainer:
    return Trainer(daemon, tmp_path)


def check_both(train: Trainer, script: str, launcher: tuple[str, ...] = _TORCHRUN) -> None:
    """gradsync reduces when the script is attached, which it does not notice."""
    ours = train(script, launcher=launcher)
    assert ours["backend"] == "gradsync"
    assert ours["classes"][:2] == [_TORCHS, _OURS]
    assert ours["reductions"] > 0
    theirs = train(script, launcher=launcher, attached=False)
    assert theirs["backend"] == "gloo"
    assert _OURS not in theirs["classes"]
    assert theirs["reductions"] == 0
    torch.testing.assert_close(ours["parameters"], theirs["parameters"])


_TRAIN = """
def train(model, steps=4):
    generator = torch.Generator().manual_seed(dist.get_rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 6, generator=generator)).square().mean().backward()
        optimizer.step()
    return model

def module():
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3))
"""

_MECHANICS = """
import copy, pickle
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.parallel.distributed import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

class Derived(DDP):
    def __init__(self, module):
        super().__init__(module, gradient_as_bucket_view=True)

dist.init_process_group(%r)
model = DDP(module())
data = TensorDataset(torch.randn(16, 6, generator=torch.Generator().manual_seed(dist.get_rank())))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, in DataLoader(data, batch_size=4, num_workers=2):  # which are forked
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
train(model)
pickled = pickle.dumps(model)
derived = Derived(module())
report(
    model,
    same_name=DDP is DistributedDataParallel is nn.parallel.DistributedDataParallel,
    same_type=type(model) in (nn.DataParallel, DDP),
    instance=isinstance(model, DDP) and issubclass(Derived, nn.parallel.DistributedDataParallel),
    others=not isinstance(model, Derived) and not isinstance(model.module, DDP),
    derived=classes(train(derived)),
    copies=[classes(train(copy.deepcopy(model))), classes(train(pickle.loads(pickled)))],
    pickled=pickled,
    groups=[dist.get_backend(dist.new_group(backend="gloo")), dist.get_backend(dist.new_group()),
            dist.get_backend(init_device_mesh("cpu", (2,)).get_group())],
    child=subprocess.run([sys.executable, "-c", "import sys; print(*sys.modules)"],
                         stdout=subprocess.PIPE, text=True).stdout,
)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("backend", ["gloo", None, "cpu:gloo"])
def test_a_script_does_not_notice(train: Trainer, backend: str | None) -> None:
    script = _TRAIN + _MECHANICS % backend
    ours = train(script)
    used = "cpu:gradsync" if backend == "cpu:gloo" else "gradsync"
    assert ours["backend"] == used
    assert ours["reductions"] > 0
    assert ours["groups"] == ["gradsync", used, used]
    for name in ("same_name", "same_type", "instance", "others"):
        assert ours[name], name
    assert ours["classes"][:2] == [_TORCHS, _OURS]
    assert ours["derived"][:3] == ["__main__.Derived", _TORCHS, _OURS]
    assert [copy[:2] for copy in ours["copies"]] == [[_TORCHS, _OURS]] * 2
    assert "sitecustomize" in ours["child"]
    assert train.err.count("warning: ") == 0
    if backend == "gloo":
        theirs = train(script, attached=False)
        assert _OURS not in theirs["classes"]
        assert theirs["reductions"] == 0
        torch.testing.assert_close(ours["parameters"], theirs["parameters"])
        load_without_gradsync(train.folder, ours["pickled"])


def load_without_gradsync(folder: Path, pickled: bytes) -> None:
    (folder / "model.pickle").write_bytes(pickled)
    code = """
import pathlib, pickle, sys
sys.modules["gradsync"] = None
import torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = pickle.loads(pathlib.Path(sys.argv[1]).read_bytes())
assert type(model) is torch.nn.parallel.DistributedDataParallel
model(torch.ones(1, 6)).sum().backward()
"""
    ended = execute(sys.executable, "-c", code, folder / "model.pickle")
    assert ended.status == 0, ended.err


def test_ranks_that_a_script_starts_itself(train: Trainer) -> None:
    script = (
        _TRAIN
        + """
def work(rank):
    store = "file://" + sys.argv[1] + ".store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    report(train(nn.parallel.DistributedDataParallel(module())))
    dist.destroy_process_group()

if __name__ == "__main__":
    torch.multiprocessing.spawn(work, nprocs=2)
"""
    )
    ours = train(script, launcher=(sys.executable,))
    assert ours["backend"] == "gradsync"
    assert ours["classes"][:2] == [_TORCHS, _OURS]
    assert ours["reductions"] > 0


_PLAIN = (
    _TRAIN
    + """
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
model = DDP(module())
report(train(model), instance=isinstance(model, DDP), same_type=type(model) is DDP)
dist.destroy_process_group()
"""
)


@pytest.mark.parametrize(
    ("before", "same_type"),
    [
        ("import os; os.environ['LOCAL_WORLD_SIZE'] = '1'", True),
        # Nobody tells before the ranks meet.
        ("import os, torch, gradsync._attach as a; a._node = lambda: os.environ['RANK']", False),
    ],
    ids=["told", "found"],
)
def test_ranks_on_several_nodes_are_left_as_they_are(
    train: Trainer, before: str, same_type: bool
) -> None:
    theirs = train(_PLAIN, before=before)
    assert theirs["backend"] == "gloo"
    assert theirs["classes"][0] == _TORCHS
    assert _OURS not in theirs["classes"]
    assert theirs["instance"]
    assert theirs["same_type"] == same_type
    assert theirs["reductions"] == 0
    assert train.err.count("gradsync-run: warning: ") == 1
    assert "its ranks are not all on one node" in train.err


def test_without_our_extension_a_trainer_is_left_as_it_is(train: Trainer) -> None:
    theirs = train(_PLAIN, before="import sys; sys.modules['gradsync.torch._C'] = None")
    assert theirs["backend"] == "gloo"
    assert _OURS not in theirs["classes"]
    assert theirs["same_type"]
    assert train.err.count("gradsync-run: warning: ") == 2  # of each rank
    assert "gradsync.torch cannot be imported" in train.err


def test_where_there_is_a_gpu_the_module_decides(train: Trainer) -> None:
    script = (
        _TRAIN
        + """
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
elsewhere = nn.Linear(2, 2, device="meta")
report(train(DDP(module())), name=DDP.__mro__[0].__module__,
       elsewhere=type(DDP.__new__(DDP, elsewhere)) is DDP)
"""
    )
    ours = train(
        script, before="import torch, gradsync._attach as a; a._accelerator = lambda: 'cuda'"
    )
    assert ours["backend"] == "cpu:gradsync,cuda:gloo"
    assert ours["classes"][:2] == [_OURS, _TORCHS]
    assert ours["reductions"] > 0
    assert ours["name"] == "torch.nn.parallel.distributed"
    assert ours["elsewhere"]


def test_a_script_that_uses_gradsync_already(train: Trainer) -> None:
    script = (
        _TRAIN
        + """
from torch.nn.parallel import DistributedDataParallel as Theirs
dist.init_process_group("gradsync")
model = train(DistributedDataParallel(module()))
report(model, instance=isinstance(model, Theirs), theirs=classes(Theirs(module())))
dist.destroy_process_group()
"""
    )
    ours = train(script, before="from gradsync.torch import DistributedDataParallel")
    assert ours["backend"] == "gradsync"
    assert ours["classes"][:2] == [_OURS, _TORCHS]
    assert ours["instance"]
    assert ours["theirs"][:2] == [_TORCHS, _OURS]


@pytest.mark.parametrize(
    ("asked", "accelerator", "backend"),
    [
        ("gloo", None, "gradsync"),
        ("GLOO", None, "gradsync"),
        ("gloo", "cuda", "cpu:gradsync,cuda:gloo"),
        ("gloo", "xpu", "gradsync"),  # which gloo does not serve either
        ("undefined", None, "gradsync"),
        ("undefined", "cuda", "undefined"),
        ("cpu:gloo,cuda:nccl", "cuda", "cpu:gradsync,cuda:nccl"),
        ("cuda:gloo,cpu:gloo", "cuda", "cuda:gloo,cpu:gradsync"),
        ("cpu:mpi,cuda:gloo", "cuda", "cpu:mpi,cuda:gloo"),
        ("nccl", "cuda", "nccl"),
        ("mpi", None, "mpi"),
    ],
)
def test_only_gloo_for_the_cpu_is_replaced(
    monkeypatch: pytest.MonkeyPatch, asked: str, accelerator: str | None, backend: str
) -> None:
    monkeypatch.setattr(_attach, "_accelerator", lambda: accelerator)
    assert _attach.backend_for(asked) == backend


# ---- Trainers of others --------------------------------------------------------------------------


def test_accelerate(train: Trainer) -> None:
    script = """
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(7)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
model, optimizer, loader = accelerator.prepare(
    model,
    torch.optim.AdamW(model.parameters(), lr=1e-2),
    DataLoader(data, batch_size=4, shuffle=True),
)
for epoch in range(2):
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
assert accelerator.num_processes == 2 and accelerator.gather(loss.detach()[None]).shape == (2,)
assert accelerator.unwrap_model(model) is model.module
report(model)
accelerator.end_training()
"""
    launch = (sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes=1")
    check_both(train, script, launcher=(*launch, *_TORCHRUN[1:]))


def test_transformers(train: Trainer) -> None:
    script = """
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

torch.manual_seed(7)
model = GPT2LMHeadModel(GPT2Config(
    vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=2,
    bos_token_id=0, eos_token_id=0,
    resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
))
tokens = torch.randint(0, 50, (48, 16))
trainer = Trainer(
    model=model,
    args=TrainingArguments(
        output_dir=sys.argv[1] + ".output", use_cpu=True, max_steps=6, report_to=[],
        per_device_train_batch_size=2, gradient_accumulation_steps=2, learning_rate=1e-2,
        dataloader_num_workers=1, save_strategy="no", disable_tqdm=True, logging_steps=3,
    ),
    train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
)
trainer.train()
assert trainer.args.world_size == 2 and trainer.state.global_step == 6
report(trainer.model_wrapped)
dist.destroy_process_group()
"""
    check_both(train, script)


def test_lightning(train: Trainer) -> None:
    script = """
import lightning
from torch.utils.data import DataLoader, TensorDataset

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))

    def training_step(self, batch, index):
        x, y = batch
        loss = nn.functional.mse_loss(self.layers(x), y)
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def on_train_end(self):
        report(self.trainer.strategy.model)

lightning.seed_everything(7)
data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
trainer = lightning.Trainer(
    strategy="ddp", accelerator="cpu", devices=2, max_epochs=2, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    default_root_dir=sys.argv[1] + ".output",
)
trainer.fit(Module(), DataLoader(data, batch_size=4, shuffle=True))
"""
    check_both(train, script, launcher=(sys.executable,))
