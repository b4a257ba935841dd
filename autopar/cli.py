"""The command line: `autopar plan`, `autopar explain`, `autopar doctor`.

A user's mistake is printed as the four parts of its error, and the exit code is 2; --debug shows the traceback too.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import inspect
import math
import os
import platform
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, NamedTuple
from unittest import mock

import typer

from autopar.cluster import ClusterSpec
from autopar.errors import AutoparError, PlanError
from autopar.plan import Plan

_ABOUT = """Find the fastest parallel plan for training a PyTorch model, and say why it is.

A plan is made on one process, for any cluster. Running one is torchrun's business, or Slurm's: in a training script,
autopar.parallelize(model, cluster, batch, plan=autopar.Plan.load("plan.json")), and then
torchrun --nproc-per-node 4 script.py.
"""
_MODEL = "package.module:function, which returns model, example_inputs[, loss_fn]; or hf:DIR or hf:CONFIG.json"
_CLUSTER = "nodes x devices per node x kind, such as 2x8xH100 or 4xcpu; a .toml file; or detect"

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


def main() -> None:
    """The console's `autopar`."""
    app()


def _print_version(wanted: bool) -> None:
    if wanted:
        from autopar import __version__

        typer.echo(f"autopar {__version__}")
        raise typer.Exit


@app.callback(help=_ABOUT)
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


@app.command("plan")
def plan_command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=_MODEL)],
    cluster: Annotated[str, typer.Option("--cluster", "-c", help=_CLUSTER)],
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the plan is written.")] = Path("plan.json"),
    mesh: Annotated[str, typer.Option(help="Pin the mesh, slow link first: dp=4,tp=2.")] = "",
    zero: Annotated[int | None, typer.Option(help="Pin how weights are stored, as ZeRO's stage.", min=0, max=3)] = None,
    memory_limit: Annotated[str, typer.Option(help="Bytes per device, such as 60GiB.")] = "",
    time_limit: Annotated[float, typer.Option(help="Seconds for the solver.", min=0.0)] = 60.0,
    precision: Annotated[str, typer.Option(help="fp32, bf16, fp16 or fp64.")] = "fp32",
    optimizer: Annotated[str, typer.Option(help="adamw, adam, sgd_momentum, sgd or none.")] = "adamw",
    batch: Annotated[int, typer.Option(help="Global batch of an hf: model.", min=1)] = 8,
    seq: Annotated[
        int | None, typer.Option(help="Tokens per row of an hf: model; at most 1024 if left out.", min=1)
    ] = None,
    debug: Debug = False,
) -> None:
    """Plan how to train MODEL on a cluster; print the plan and why, and write it to a file.

    The model is only looked at, never run: an hf: model has no weights at all, so that a laptop plans for any cluster.
    """
    with _errors_printed(debug):
        from autopar.api import plan as make_plan
        from autopar.progress import progress_line
        from autopar.solver.search import Search

        where = parse_cluster(cluster)
        limit = parse_bytes(memory_limit) if memory_limit else None
        search = Search(mesh=parse_mesh(mesh) if mesh else None, zero=zero)
        if not output.absolute().parent.is_dir():
            raise PlanError("the plan cannot be written", where=output, expected="a folder that is there")
        with _stdout_kept_clean(), progress_line() as progress:
            loaded = load_model(model, batch, seq, precision)
            plan = make_plan(
                loaded.model,
                where,
                loaded.example_inputs,
                loss_fn=loaded.loss_fn,
                optimizer=optimizer,
                precision=precision,
                memory_limit=limit,
                search=search,
                time_limit=time_limit,
                progress=progress,
            )
        plan.save(output)
        typer.echo(plan.explain(), nl=False)
        typer.echo(f"written to {output}; run it by torchrun, on {plan.world_size} processes", err=True)


@app.command("explain")
def explain_command(
    plan: Annotated[Path, typer.Argument(metavar="PLAN.json", help="A plan that `autopar plan` or Plan.save wrote.")],
    debug: Debug = False,
) -> None:
    """Print what a plan file says: what runs where, what it costs, and why not otherwise."""
    with _errors_printed(debug):
        typer.echo(Plan.load(plan).explain(), nl=False)


@app.command("doctor")
def doctor_command() -> None:
    """Say whether this machine has what autopar needs; the exit code is 1 where it does not."""
    checks = examine()
    width = max(len(c.name) for c in checks)
    for check in checks:
        typer.echo(f"{check.level:<7}  {check.name:<{width}}  {check.found}")
        if check.advice:
            typer.echo(f"{'':<7}  {'':<{width}}  -> {check.advice}")
    lacking = [c.name for c in checks if c.level == "missing"]
    typer.echo(f"\nmissing: {', '.join(lacking)}" if lacking else "\nnothing that is needed is missing")
    raise typer.Exit(1 if lacking else 0)


@contextlib.contextmanager
def _errors_printed(debug: bool) -> Iterator[None]:
    """Print an AutoparError on stderr and exit with 2.  A bug's exception goes on, with its traceback."""
    try:
        yield
    except AutoparError as error:
        if debug:
            traceback.print_exc()
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None


@contextlib.contextmanager
def _stdout_kept_clean() -> Iterator[None]:
    """Send to stderr what others print: a model's own code, and HiGHS, whose banner no option switches off."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


# ------------------------------------------------------------------------------------------------ options


def parse_cluster(text: str) -> ClusterSpec:
    """A cluster as the command line names it.  Raises PlanError."""
    if text == "detect":
        return ClusterSpec.detect()
    return ClusterSpec.load(text) if text.endswith(".toml") else ClusterSpec(text)


def parse_mesh(text: str) -> dict[str, int]:
    """``dp=4,tp=2`` -> {"dp": 4, "tp": 2}.  Raises PlanError."""
    mesh: dict[str, int] = {}
    for word in text.split(","):
        match = re.fullmatch(r"\s*([A-Za-z_]\w*)=(\d+)\s*", word)
        if match is None or match[1] in mesh or int(match[2]) == 0:
            raise PlanError(
                "the mesh cannot be read",
                where="--mesh",
                expected="axis=size, each axis once: dp=4,tp=2",
                got=repr(text),
            )
        mesh[match[1]] = int(match[2])
    return mesh


_UNITS = (
    {"": 1, "B": 1}
    | {f"{p}B": 1000**k for k, p in enumerate("KMGT", 1)}
    | {f"{p}IB": 1024**k for k, p in enumerate("KMGT", 1)}
)


def parse_bytes(text: str) -> float:
    """``60GiB``, ``80 GB``, ``1024``.  Raises PlanError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in _UNITS or not float(match[1]):
        raise PlanError(
            "the memory limit cannot be read", where="--memory-limit", expected="bytes, such as 60GiB", got=repr(text)
        )
    return float(match[1]) * _UNITS[match[2].upper()]


# ------------------------------------------------------------------------------------------------ models


class Loaded(NamedTuple):
    """What a plan is made for."""

    model: Any
    example_inputs: Any
    loss_fn: Callable[..., Any] | None = None


def load_model(text: str, batch: int, seq: int | None, precision: str = "fp32") -> Loaded:
    """The model that MODEL names.  Raises PlanError where there is none."""
    if text.startswith("hf:"):
        return load_hugging_face(text.removeprefix("hf:"), batch, seq, precision)
    module, colon, function = text.partition(":")
    if not colon or not all(word.isidentifier() for word in (*module.split("."), function)):
        raise PlanError("the model cannot be read", where="MODEL", expected=_MODEL, got=repr(text))
    return load_function(module, function)


def load_function(module: str, function: str) -> Loaded:
    """Call ``module:function`` of the installed packages or of the current directory."""
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not (module == error.name or module.startswith(f"{error.name}.")):
            raise _raised(error, f"importing {module} failed") from error
        raise PlanError(
            "the model's module cannot be found",
            where=f"{module}:{function}",
            expected=f"a module in {here} or an installed one",
            got=str(error),
            hint="run autopar in the folder that the module's package is in",
        ) from error
    except Exception as error:
        raise _raised(error, f"importing {module} failed") from error
    make = getattr(found, function, None)
    if not callable(make):
        own = [n for n, v in vars(found).items() if inspect.isfunction(v) and v.__module__ == found.__name__]
        raise PlanError(
            "the model's function cannot be found",
            where=f"{module}:{function}",
            expected=f"one of {', '.join(own)}" if own else "a function of that module",
            got="none of that name" if make is None else repr(make),
        )
    try:
        made = make()
    except AutoparError:
        raise
    except Exception as error:
        raise _raised(error, f"{module}:{function}() failed") from error
    return _checked(made, f"{module}:{function}")


def _checked(made: Any, where: str) -> Loaded:
    from torch import nn

    good = isinstance(made, tuple) and len(made) in (2, 3) and isinstance(made[0], nn.Module)
    if not good or (len(made) == 3 and made[2] is not None and not callable(made[2])):
        kinds = ", ".join(type(m).__name__ for m in made) if isinstance(made, tuple) else type(made).__name__
        raise PlanError(
            "the model's function returns something else",
            where=where,
            expected="a tuple of model, example_inputs and, if the model gives no loss, loss_fn",
            got=f"({kinds})" if isinstance(made, tuple) else kinds,
        )
    return Loaded(*made)


def _raised(error: Exception, what: str) -> PlanError:
    """An exception of the user's own code, with the line that raised it."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return PlanError(
        what,
        where=f"{frame.filename}:{frame.lineno}, in {frame.name}",
        got=f"{type(error).__name__}: {error}",
        hint="autopar plan --debug shows the traceback",
    )


class _Task(NamedTuple):
    """Models of one kind: how their architectures are called, the class that builds them, and what a batch holds.

    fields: name of an input -> whether it has one entry per token, else one per row.
    """

    endings: tuple[str, ...]
    factory: str
    fields: dict[str, bool]


_TASKS = (
    _Task(("ForCausalLM", "LMHeadModel"), "AutoModelForCausalLM", {"input_ids": True, "labels": True}),
    _Task(("ForMaskedLM",), "AutoModelForMaskedLM", {"input_ids": True, "labels": True}),
    _Task(("ForConditionalGeneration",), "AutoModelForSeq2SeqLM", {"input_ids": True, "labels": True}),
    _Task(("ForSequenceClassification",), "AutoModelForSequenceClassification", {"input_ids": True, "labels": False}),
    _Task(("ForTokenClassification",), "AutoModelForTokenClassification", {"input_ids": True, "labels": True}),
    _Task(
        ("ForQuestionAnswering",),
        "AutoModelForQuestionAnswering",
        {"input_ids": True, "start_positions": False, "end_positions": False},
    ),
)


def load_hugging_face(path: str, batch: int, seq: int | None, precision: str) -> Loaded:
    """Build a model from its configuration without allocating its weights, in training mode, and a batch of zeros.

    Raises PlanError where there is no configuration, or it is of a kind that this does not know how to feed.
    """
    try:
        import transformers
    except ImportError as error:
        raise PlanError(
            "hf: models need transformers", where=f"hf:{path}", got=str(error), hint="pip install transformers"
        ) from error
    import torch

    transformers.logging.set_verbosity_error()
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    if not file.is_file():
        raise PlanError(
            "no model configuration",
            where=f"hf:{path}",
            expected="a folder with config.json, or such a file, on this machine",
            got=f"{file} is not there",
        )
    try:
        config = transformers.AutoConfig.from_pretrained(str(file), local_files_only=True)
    except Exception as error:
        raise PlanError("the model configuration cannot be read", where=file, got=error) from error
    task = _task(config, file)
    config.use_cache = False  # a training step needs none, and its tensors would be outputs of the graph
    longest = getattr(config, "max_position_embeddings", None)
    tokens = seq or min(longest or 1024, 1024)
    if longest is not None and tokens > longest:
        raise PlanError(
            "more tokens than the model has positions", where="--seq", expected=f"at most {longest}", got=tokens
        )
    dtype = torch.float64 if precision == "fp64" else torch.float32
    try:
        with _without_weights():
            model = getattr(transformers, task.factory).from_config(config, dtype=dtype)
    except Exception as error:
        raise _raised(error, f"{task.factory} cannot build the model") from error
    shapes = {name: (batch, tokens) if per_token else (batch,) for name, per_token in task.fields.items()}
    return Loaded(model.train(), {name: torch.zeros(shape, dtype=torch.int64) for name, shape in shapes.items()})


@contextlib.contextmanager
def _without_weights() -> Iterator[None]:
    """Modules that are made inside get fake parameters, which have a shape and take no memory.

    Buffers are real.  Were they on the meta device too, masks and positions that are made of them would not be
    known, and the captured graph would not be that of the model with its weights: its plan would be for another model.
    """
    import torch
    from torch import nn
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    register = nn.Module.register_parameter

    def register_fake(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not isinstance(parameter, FakeTensor):
            with mode:
                empty = torch.empty(parameter.shape, dtype=parameter.dtype)
            parameter = nn.Parameter(empty, requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    with mock.patch.object(nn.Module, "register_parameter", register_fake):
        yield


def _task(config: Any, file: Path) -> _Task:
    """The kind of model that a configuration is for."""
    import transformers

    architectures = getattr(config, "architectures", None) or []
    for task in _TASKS:
        if any(a.endswith(task.endings) for a in architectures):
            return task
    if not architectures:
        for task in (
            _TASKS[1],
            _TASKS[2],
            _TASKS[0],
        ):  # a decoder has no masked variant, an encoder may have a causal one
            if type(config) in getattr(transformers, task.factory)._model_mapping:
                return task
    raise PlanError(
        "no batch is known for this kind of model",
        where=file,
        expected=f"architectures that end in {', '.join(e for t in _TASKS for e in t.endings)}",
        got=", ".join(architectures) or f"none, for {config.model_type}",
        hint="write a function that returns model, example_inputs, and name it as package.module:function",
    )


# ------------------------------------------------------------------------------------------------ doctor


class Check(NamedTuple):
    """level: ok; warn, where something works less well; missing, where autopar cannot work."""

    level: str
    name: str
    found: str
    advice: str = ""


def examine() -> list[Check]:
    """Everything that `autopar doctor` looks at, in its order."""
    checks = [_python(), _torch(), *_backends(), *_solvers(), *_devices(), _cores(), _memory(), _threads()]
    return [*checks, _world(), _transformers()]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _at_least(version: str, wanted: tuple[int, int]) -> bool:
    numbers = tuple(int(n) for n in re.findall(r"\d+", version)[:2])
    return numbers >= wanted


def _python() -> Check:
    version = platform.python_version()
    if _at_least(version, (3, 11)):
        return Check("ok", "python", version)
    return Check("missing", "python", version, "use Python 3.11 or newer")


def _torch() -> Check:
    version = _version("torch")
    if version is None:
        return Check("missing", "torch", "not installed", "pip install 'torch>=2.11'")
    if not _at_least(version, (2, 11)):
        return Check("missing", "torch", version, "pip install --upgrade 'torch>=2.11'")
    return Check("ok", "torch", version)


def _backends() -> list[Check]:
    import torch
    import torch.distributed as dist

    if not dist.is_available():
        return [Check("missing", "distributed", "torch has none", "install a torch that is built with distributed")]
    checks = (
        [_gloo()]
        if dist.is_gloo_available()
        else [Check("missing", "gloo", "torch has none", "install a torch that is built with gloo; CPU ranks need it")]
    )
    if dist.is_nccl_available():
        return [*checks, Check("ok", "nccl", ".".join(map(str, torch.cuda.nccl.version())))]
    if torch.cuda.is_available():
        return [*checks, Check("missing", "nccl", "torch has none", "install a torch that is built with NCCL")]
    return [*checks, Check("ok", "nccl", "none, and no GPU that needs it")]


def _gloo() -> Check:
    """Start a group of one rank: where this host's own name leads nowhere, that fails, as torchrun's ranks would."""
    import torch.distributed as dist

    try:
        dist.ProcessGroupGloo(dist.PrefixStore("autopar-doctor", dist.HashStore()), 0, 1, timedelta(seconds=30))
    except RuntimeError as error:
        return Check(
            "missing", "gloo", f"does not start: {error}", "set GLOO_SOCKET_IFNAME to a network interface, such as lo"
        )
    return Check("ok", "gloo", "starts")


def _solvers() -> list[Check]:
    highs, pulp = _imported("highspy"), _imported("pulp")
    if highs is None and pulp is None:
        return [Check("missing", "solver", "neither highspy nor pulp", "pip install highspy pulp")]
    checks = [Check("ok", name, version) for name, version in (("highspy", highs), ("pulp", pulp)) if version]
    if highs is None:
        checks.append(Check("warn", "highspy", "not there", "pip install highspy: without it some plans have no bound"))
    if pulp is None:
        checks.append(Check("warn", "pulp", "not there", "pip install pulp, the second solver"))
    return checks


def _imported(package: str) -> str | None:
    """The version of a package that can be imported."""
    try:
        importlib.import_module(package)
    except ImportError:
        return None
    return _version(package)


def _devices() -> list[Check]:
    import torch

    count = torch.cuda.device_count()
    if not count:
        return [Check("ok", "devices", "no GPU: ranks run on the CPU")]
    kinds: dict[str, int] = {}
    for k in range(count):
        seen = torch.cuda.get_device_properties(k)
        name = f"{seen.name} with {seen.total_memory / 2**30:.0f} GiB"
        kinds[name] = kinds.get(name, 0) + 1
    found = ", ".join(f"{n}x {name}" for name, n in kinds.items())
    if len(kinds) > 1:
        return [
            Check("warn", "devices", found, "a plan takes all devices as equal: set CUDA_VISIBLE_DEVICES to one kind")
        ]
    return [_known_kind(found)]


def _known_kind(found: str) -> Check:
    from autopar.cost_model.hardware import device

    try:
        device(ClusterSpec.detect())
    except PlanError as error:
        return Check("warn", "devices", found, f"{error.what}: {error.hint or error.expected}")
    return Check("ok", "devices", found)


def usable_cores() -> int:
    """Cores that this process may use: the scheduler's set, and the quota of its control group."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="utf-8").split()
        cores = min(cores, max(1, math.ceil(int(quota) / int(period))))
    return cores


def _cores() -> Check:
    return Check("ok", "cores", str(usable_cores()))


def _memory() -> Check:
    from autopar.explain.text import format_bytes

    available = _meminfo("MemAvailable")
    if available is None:
        return Check("ok", "memory", "unknown on this system")
    with contextlib.suppress(OSError, ValueError):
        available = min(available, int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="utf-8")))
    if available < 2 * 2**30:
        return Check(
            "warn", "memory", f"{format_bytes(available)} available", "planning a large model takes up to 2 GiB"
        )
    return Check("ok", "memory", f"{format_bytes(available)} available")


def _meminfo(key: str) -> int | None:
    try:
        text = Path("/proc/meminfo").read_text(encoding="utf-8")
    except OSError:
        return None
    match = re.search(rf"^{key}:\s+(\d+) kB", text, re.MULTILINE)
    return int(match[1]) * 1024 if match else None


def _threads() -> Check:
    name, cores = "OMP_NUM_THREADS", usable_cores()
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    ranks = int(local) if local.isdecimal() and int(local) else 1
    text = os.environ.get(name, "")
    good = f"export {name}={max(1, cores // ranks)}, which is cores / ranks of this node"
    if not text:
        advice = (
            good if ranks > 1 else f"export {name}= cores / ranks of this node, at least 1; torchrun sets 1 by itself"
        )
        return Check("warn", name, f"not set: every rank would use all {cores} cores", advice)
    if not text.isdecimal() or not int(text):
        return Check("warn", name, repr(text), good)
    if int(text) * ranks > max(cores, ranks):
        return Check("warn", name, f"{text}, for {ranks} ranks on {cores} cores", good)
    return Check("ok", name, text)


def _world() -> Check:
    world = os.environ.get("WORLD_SIZE")
    if world is None:
        return Check("ok", "WORLD_SIZE", "not set: one process; torchrun --nproc-per-node N script.py starts N ranks")
    lacking = [n for n in ("RANK", "MASTER_ADDR", "MASTER_PORT") if n not in os.environ]
    if lacking:
        return Check(
            "warn", "WORLD_SIZE", f"{world}, without {', '.join(lacking)}", "launch by torchrun, which sets them all"
        )
    return Check("ok", "WORLD_SIZE", f"{world}, this is rank {os.environ['RANK']}")


def _transformers() -> Check:
    version = _version("transformers")
    if version is None:
        return Check(
            "warn", "transformers", "not installed", "pip install transformers, for hf: models and the examples"
        )
    return Check("ok", "transformers", version)


if __name__ == "__main__":
    main()
