"""The command line: `autopar plan`, `profile`, `explain`, `verify`, `doctor`.

A user's mistake is printed as the four parts of its error, and the exit code is 2; --debug shows the traceback too.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from autopar.cluster import ClusterSpec
from autopar.doctor import examine
from autopar.errors import AutoparError, PlanError
from autopar.models import MODEL, load_model
from autopar.plan import Plan

_ABOUT = """Find the fastest parallel plan for training a PyTorch model, and say why it is.

A plan is made on one process, for any cluster. Running one is torchrun's business, or Slurm's: in a training script,
autopar.parallelize(model, cluster, batch, plan=autopar.Plan.load("plan.json")), and then
torchrun --nproc-per-node 4 script.py.
"""
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


Model = Annotated[str, typer.Argument(metavar="MODEL", help=MODEL)]
Cluster = Annotated[str, typer.Option("--cluster", "-c", help=_CLUSTER)]
PlanFile = Annotated[Path, typer.Argument(metavar="PLAN.json", help="A plan that `autopar plan` or Plan.save wrote.")]
Batch = Annotated[int, typer.Option(help="Global batch of an hf: model.", min=1)]
Tokens = Annotated[int | None, typer.Option(help="Tokens per row of an hf: model; at most 1024 if left out.", min=1)]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


@app.command("plan")
def plan_command(
    model: Model,
    cluster: Cluster,
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the plan is written.")] = Path("plan.json"),
    mesh: Annotated[str, typer.Option(help="Pin the mesh, slow link first: dp=4,tp=2.")] = "",
    zero: Annotated[int | None, typer.Option(help="Pin how weights are stored, as ZeRO's stage.", min=0, max=3)] = None,
    tensor_modes: Annotated[
        str,
        typer.Option(help="Tensor mode: 1d, 2d, 2.5d, 3d, none, or '2d streamed'; of several, by commas, the best."),
    ] = "",
    sequence: Annotated[
        str, typer.Option(help="Sequence split: megatron, ulysses, ring, ring+ulysses, none; of several the best.")
    ] = "",
    memory_limit: Annotated[str, typer.Option(help="Bytes per device, such as 60GiB.")] = "",
    time_limit: Annotated[float, typer.Option(help="Seconds for the solver.", min=0.0)] = 60.0,
    precision: Annotated[str, typer.Option(help="fp32, bf16, fp16 or fp64.")] = "fp32",
    optimizer: Annotated[str, typer.Option(help="adamw, adam, sgd_momentum, sgd or none.")] = "adamw",
    batch: Batch = 8,
    seq: Tokens = None,
    profile: Annotated[Path | None, typer.Option(help="Figures that `autopar profile` measured.")] = None,
    debug: Debug = False,
) -> None:
    """Plan how to train MODEL on a cluster; print the plan and why, and write it to a file.

    The model is only looked at, never run: an hf: model has no weights at all, so that a laptop plans for any cluster.
    """
    with _errors_printed(debug):
        from autopar.api import plan as make_plan
        from autopar.cost_model.profiler import Profile
        from autopar.progress import progress_line
        from autopar.solver.search import Search

        where = parse_cluster(cluster)
        limit = parse_bytes(memory_limit) if memory_limit else None
        search = Search(
            mesh=parse_mesh(mesh) if mesh else None,
            tensor_modes=parse_names(tensor_modes),
            sequence=parse_names(sequence),
            zero=zero,
        )
        if not output.absolute().parent.is_dir():
            raise PlanError("the plan cannot be written", where=output, expected="a folder that is there")
        with _stdout_kept_clean(), progress_line() as progress:
            loaded = load_model(model, batch, seq, precision)
            measured = Profile.load(profile) if profile else None
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
                profile=measured,
                progress=progress,
            )
        plan.save(output)
        typer.echo(plan.explain(), nl=False)
        typer.echo(f"written to {output}; run it by torchrun, on {plan.world_size} processes", err=True)


@app.command("profile")
def profile_command(
    model: Model,
    cluster: Cluster,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Where the profile is kept; one that is there is added to.")
    ] = Path("profile.json"),
    mesh: Annotated[str, typer.Option(help="Only the local shapes of this mesh: dp=4,tp=2.")] = "",
    time_limit: Annotated[float, typer.Option(help="Seconds for measuring ops.", min=0.0)] = 120.0,
    batch: Batch = 8,
    seq: Tokens = None,
    debug: Debug = False,
) -> None:
    """Measure on this machine what plans of MODEL would run, for `autopar plan --profile`.

    On one process the ops at their local shapes. Under torchrun every rank measures at once, and the collectives too.
    """
    with _errors_printed(debug):
        import torch.distributed as dist

        from autopar.cost_model.profiler import Profile
        from autopar.profiling import profile
        from autopar.progress import progress_line
        from autopar.solver.search import Search

        where = parse_cluster(cluster)
        search = Search(mesh=parse_mesh(mesh) if mesh else None)
        known = Profile.load(output) if output.exists() else None
        if "WORLD_SIZE" in os.environ:
            dist.init_process_group()
        with _stdout_kept_clean(), progress_line() as progress:
            loaded = load_model(model, batch, seq, "fp32")
            found = profile(
                loaded.model,
                where,
                loaded.example_inputs,
                loss_fn=loaded.loss_fn,
                search=search,
                known=known,
                time_limit=time_limit,
                progress=progress,
            )
        if not dist.is_initialized() or dist.get_rank() == 0:
            found.save(output)
            hidden = "" if found.overlap is None else f", overlap {found.overlap:.2f}"
            kinds = sum(len(of) for of in found.collectives.values())
            typer.echo(f"{len(found.ops)} ops and {kinds} kinds of collectives{hidden}, written to {output}")
        if dist.is_initialized():
            dist.destroy_process_group()


@app.command("explain")
def explain_command(
    plan: PlanFile,
    debug: Debug = False,
) -> None:
    """Print what a plan file says: what runs where, what it costs, and why not otherwise."""
    with _errors_printed(debug):
        typer.echo(Plan.load(plan).explain(), nl=False)


@app.command("verify")
def verify_command(
    plan: PlanFile,
    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL + "; as it was planned.")],
    precision: Annotated[str, typer.Option(help="As it was planned.")] = "fp32",
    batch: Batch = 8,
    seq: Tokens = None,
    step: Annotated[bool, typer.Option(help="Run one step on ranks as threads against one process.")] = True,
    max_world: Annotated[int, typer.Option(help="Run a step of plans of so many ranks at most.", min=1)] = 8,
    debug: Debug = False,
) -> None:
    """Check that what a plan makes of MODEL computes the model, and moves what the plan says; exit with 1 if not.

    One process looks at the program of every kind of rank: every value's layout is derived anew, and the collectives
    are counted.  Where the plan is small enough one step is run too, in float64.
    """
    with _errors_printed(debug):
        from autopar.verify import verify_plan

        decided = Plan.load(plan)
        with _stdout_kept_clean():
            loaded = load_model(model, batch, seq, precision)
            report = verify_plan(
                decided, loaded.model, loaded.example_inputs, loss_fn=loaded.loss_fn, step=step, max_world=max_world
            )
        typer.echo(str(report))
        raise typer.Exit(0 if report.ok else 1)


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


def parse_names(text: str) -> tuple[str, ...] | None:
    """``1d, 2d streamed`` -> ("1d", "2d streamed"); None for nothing."""
    return tuple(word.strip() for word in text.split(",")) if text else None


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


if __name__ == "__main__":
    main()
