"""The command line: options, models by name, errors in four parts, the doctor."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner, Result

import autopar
from autopar import capture, cli, doctor, models
from autopar.errors import PlanError
from autopar.passes.normalize import normalize
from autopar.plan import Plan
from autopar.program import fingerprint
from autopar.progress import progress_line

MODELS = """
import torch
from torch import nn

def mlp():
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
    return model, (torch.zeros(8, 16),), lambda out, batch: (out**2).mean()

def prints():
    print("building")
    return mlp()

def broken():
    raise ValueError("no such layer")

def wrong():
    return nn.Linear(2, 2)

def unknown_op():
    class Sorts(nn.Module):
        def forward(self, x):
            return torch.linalg.svdvals(x)
    return Sorts(), (torch.zeros(4, 4),), lambda out, batch: out.sum()

constant = 3
"""


def run(*words: object) -> Result:
    return CliRunner().invoke(cli.app, [str(w) for w in words])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current directory with a package ``zoo.models``."""
    package = tmp_path / "zoo"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "models.py").write_text(MODELS)
    (package / "needs.py").write_text("import package_that_is_not_there\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in [n for n in sys.modules if n.split(".")[0] == "zoo"]:
        monkeypatch.delitem(sys.modules, name)
    return tmp_path


def assert_refused(result: Result, *parts: str) -> None:
    """Exit code 2, all parts on stderr, nothing on stdout, no traceback."""
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert "Traceback" not in result.stderr
    for part in parts:
        assert part in result.stderr


# ------------------------------------------------------------------------------------------------ plan, explain


def test_version_and_help() -> None:
    assert run("--version").stdout == f"autopar {autopar.__version__}\n"
    assert "torchrun" in run("--help").stdout
    assert run("plan").exit_code == 2


def untimed(text: str) -> str:
    """What explain() says of the same plan from a file, which does not tell how long the search took."""
    return re.sub(r"   solved in [\d.]+ s", "", text)


@pytest.mark.parametrize("options", [("--mesh", "dp=2,tp=2"), ("--mesh", "x=4", "--zero", "3", "--time-limit", "20")])
def test_plan_is_written_and_explained(folder: Path, options: tuple[str, ...]) -> None:
    result = run("plan", "zoo.models:mlp", "--cluster", "4xcpu", "-o", "p.json", *options)
    assert result.exit_code == 0, result.output
    plan = Plan.load(folder / "p.json")
    assert plan.mesh == cli.parse_mesh(options[1])
    assert plan.explain() in untimed(result.stdout)
    assert f"Plan {plan.id}  Sequential on 4x cpu as {plan.device_mesh}   optimal" in result.stdout
    assert run("explain", "p.json").stdout == plan.explain()


def test_whole_text_of_a_solved_plan(tmp_path: Path) -> None:
    """Every part of explain() is there: figures, kinds, table with a repeated block, storage, why not."""
    config_of("gpt2", "GPT2LMHeadModel").save_pretrained(tmp_path)
    words = ("--cluster", "2xA100", "--mesh", "dp=2", "--batch", "4", "--seq", "16", "-o", tmp_path / "p.json")
    result = run("plan", f"hf:{tmp_path}", *words)
    assert result.exit_code == 0, result.output
    for part in (
        "step ",
        "  compute = forward ",
        "  memory = ",
        "kinds: dp: ",
        "transformer.h.0-1 (2 alike)",
        "\n  mlp.c_fc",
    ):
        assert part in result.stdout
    assert "transformer.h.0-1.ln_1.weight" in result.stdout.partition("\nparameters\n")[2]
    assert "\nwhy not " in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 100


def test_stdout_is_the_plan_alone(folder: Path) -> None:
    """In a process of its own, since what C++ prints goes past Python's stdout."""
    program = "import sys; from autopar.cli import main; main()"
    words = ("plan", "zoo.models:prints", "--cluster", "2xcpu", "--mesh", "x=2")
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert untimed(done.stdout) == Plan.load(folder / "plan.json").explain()
    assert "building" in done.stderr and "written to plan.json" in done.stderr


def test_cluster_from_file(folder: Path) -> None:
    autopar.ClusterSpec("2xcpu", memory=2**30).save(folder / "c.toml")
    result = run("plan", "zoo.models:mlp", "-c", "c.toml", "--mesh", "x=2")
    assert result.exit_code == 0, result.output
    assert Plan.load(folder / "plan.json").cluster == "1x2xcpu memory=1073741824"
    assert " of 1 GiB on rank 0" in result.stdout


def test_nothing_fits(folder: Path) -> None:
    result = run("plan", "zoo.models:mlp", "-c", "2xcpu", "--mesh", "x=2", "--memory-limit", "1kB")
    assert result.exit_code == 2
    assert "short by:" in result.stderr and "Traceback" not in result.stderr
    assert not Path("plan.json").exists()


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (("zoo.models",), ("the model cannot be read", "package.module:function", "'zoo.models'")),
        (("zoo.modles:mlp",), ("module cannot be found", "No module named 'zoo.modles'", "in the folder")),
        (("zoo.models:mpl",), ("function cannot be found", "one of mlp, prints, broken", "none of that name")),
        (("zoo.models:constant",), ("function cannot be found", "got:      3")),
        (
            ("zoo.models:broken",),
            ("zoo.models:broken() failed", "models.py:14, in broken", "ValueError: no such layer"),
        ),
        (("zoo.models:wrong",), ("returns something else", "expected: a tuple of model", "got:      Linear")),
        (("zoo.needs:model",), ("importing zoo.needs failed", "needs.py:1", "package_that_is_not_there")),
        (("zoo.models:unknown_op",), ("where:    ", "svdvals")),
        (("zoo.models:mlp", "--mesh", "dp=4;tp=2"), ("the mesh cannot be read", "dp=4,tp=2", "'dp=4;tp=2'")),
        (("zoo.models:mlp", "--mesh", "dp=3"), ("the mesh does not fill the cluster",)),
        (("zoo.models:mlp", "--memory-limit", "60 gallons"), ("memory limit cannot be read", "60GiB", "'60 gallons'")),
        (("zoo.models:mlp", "--precision", "fp8"), ("unknown precision", "bf16", "fp8")),
        (("zoo.models:mlp", "--cluster", "four"), ("the cluster cannot be read", "'2x8xH100'", "'four'")),
        (("zoo.models:mlp", "--cluster", "none.toml"), ("the cluster file cannot be read", "none.toml")),
        (("zoo.models:mlp", "--cluster", "4xTPU"), ("TPU", "expected: one of")),
        (("zoo.models:mlp", "-o", "no/such/p.json"), ("the plan cannot be written", "no/such/p.json")),
        (("hf:nowhere",), ("no model configuration", "config.json", "nowhere is not there")),
    ],
)
def test_refusals(folder: Path, words: tuple[str, ...], parts: tuple[str, ...]) -> None:
    cluster = () if "--cluster" in words else ("--cluster", "4xcpu")
    assert_refused(run("plan", *words, *cluster), *parts)
    assert not Path("plan.json").exists()


def test_debug_shows_the_traceback(folder: Path) -> None:
    result = run("plan", "zoo.models:broken", "--cluster", "4xcpu", "--debug")
    assert result.exit_code == 2
    assert "Traceback" in result.stderr and 'raise ValueError("no such layer")' in result.stderr
    assert "error: zoo.models:broken() failed" in result.stderr


def test_explain_of_a_bad_file(tmp_path: Path) -> None:
    assert_refused(run("explain", tmp_path / "none.json"), "the plan file cannot be read", "none.json")
    model = nn.Linear(4, 4)
    autopar.random_plan(model, "2xcpu", (torch.zeros(4, 4),), loss_fn=lambda out, _: (out**2).mean()).save(
        tmp_path / "p"
    )
    assert run("explain", tmp_path / "p").exit_code == 0
    text = (tmp_path / "p").read_text()
    for damaged in (
        text[: len(text) // 2],
        text.replace('"version": 1', '"version": 9'),
        "[]",
        text.replace('"ops"', '"opps"'),
    ):
        (tmp_path / "p").write_text(damaged)
        assert_refused(run("explain", tmp_path / "p"), "where:", "expected:", "got:")


# ------------------------------------------------------------------------------------------------ options


@pytest.mark.parametrize(
    ("text", "value"),
    [("60GiB", 60 * 2**30), ("80 GB", 80e9), ("1.5mib", 1.5 * 2**20), ("1024", 1024), ("7B", 7), ("2TiB", 2 * 2**40)],
)
def test_bytes(text: str, value: float) -> None:
    assert cli.parse_bytes(text) == value


def test_mesh() -> None:
    assert cli.parse_mesh("dp=4, tp=2") == {"dp": 4, "tp": 2}
    for bad in ("dp=2,dp=2", "dp", "dp=0", "=2", "dp=-1", "dp=2,"):
        with pytest.raises(PlanError):
            cli.parse_mesh(bad)


# ------------------------------------------------------------------------------------------------ Hugging Face


def config_of(kind: str, architecture: str | None):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 53}
    if kind == "gpt2":
        sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 53, "n_positions": 64}
    if kind in ("bert", "llama"):
        sizes |= {"intermediate_size": 64, "max_position_embeddings": 64}
    return transformers.AutoConfig.for_model(kind, **sizes, architectures=architecture and [architecture])


@pytest.mark.parametrize(
    ("kind", "architecture", "built", "fields"),
    [
        ("gpt2", "GPT2LMHeadModel", "GPT2LMHeadModel", {"input_ids": (4, 16), "labels": (4, 16)}),
        ("llama", "LlamaForCausalLM", "LlamaForCausalLM", {"input_ids": (4, 16), "labels": (4, 16)}),
        ("bert", "BertForMaskedLM", "BertForMaskedLM", {"input_ids": (4, 16), "labels": (4, 16)}),
        (
            "bert",
            "BertForSequenceClassification",
            "BertForSequenceClassification",
            {"input_ids": (4, 16), "labels": (4,)},
        ),
        ("gpt2", None, "GPT2LMHeadModel", {"input_ids": (4, 16), "labels": (4, 16)}),
        ("bert", None, "BertForMaskedLM", {"input_ids": (4, 16), "labels": (4, 16)}),
    ],
)
def test_hugging_face(tmp_path: Path, kind: str, architecture: str | None, built: str, fields: dict) -> None:
    """From a folder or its file, no weights, and the graph of the model with weights: a plan is for that one."""
    config = config_of(kind, architecture)
    config.save_pretrained(tmp_path)
    loaded = models.load_model(f"hf:{tmp_path}", 4, 16)
    assert type(loaded.model).__name__ == built and loaded.model.training
    assert {name: tuple(v.shape) for name, v in loaded.example_inputs.items()} == fields
    assert type(models.load_model(f"hf:{tmp_path / 'config.json'}", 4, None).model).__name__ == built

    config.use_cache = False
    real = type(loaded.model)(config).train()
    prints = []
    for model in (loaded.model, real):
        program = normalize(capture.capture(model, loaded.example_inputs), dict(model.named_buffers()))
        prints.append(fingerprint(program))
    assert prints[0] == prints[1]


def test_hugging_face_without_memory(tmp_path: Path) -> None:
    """80 GiB of weights, none of which is there."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=12, n_embd=12288, n_head=96, architectures=["GPT2LMHeadModel"])
    config.save_pretrained(tmp_path)
    model = models.load_model(f"hf:{tmp_path}", 4, 16).model
    assert sum(p.nbytes for p in model.parameters()) > 80 * 2**30
    assert model.lm_head.weight is model.transformer.wte.weight


def test_hugging_face_refusals(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    transformers.ViTConfig(architectures=["ViTForImageClassification"]).save_pretrained(tmp_path)
    with pytest.raises(PlanError, match="no batch is known"):
        models.load_model(f"hf:{tmp_path}", 4, 16)
    config_of("gpt2", "GPT2LMHeadModel").save_pretrained(tmp_path)
    with pytest.raises(PlanError, match="more tokens than the model has positions"):
        models.load_model(f"hf:{tmp_path}", 4, 65)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(PlanError, match="configuration cannot be read"):
        models.load_model(f"hf:{tmp_path}", 4, 16)


# ------------------------------------------------------------------------------------------------ doctor


@pytest.fixture
def healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment in which nothing is warned about."""
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def levels() -> dict[str, str]:
    return {c.name: c.level for c in doctor.examine()}


def test_doctor(healthy: None) -> None:
    result = run("doctor")
    assert result.exit_code == 0
    assert result.stdout.endswith("\nnothing that is needed is missing\n")
    names = (
        "python",
        "torch",
        "gloo",
        "nccl",
        "highspy",
        "pulp",
        "devices",
        "cores",
        "memory",
        "OMP_NUM_THREADS",
        "WORLD_SIZE",
    )
    for name, line in zip((*names, "transformers"), result.stdout.splitlines(), strict=False):
        assert line.split()[:2] == ["ok", name], result.stdout


def test_doctor_finds_what_is_missing(healthy: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_version", {"torch": "2.10.1"}.get)
    monkeypatch.setattr(doctor, "_imported", lambda package: None)
    monkeypatch.setattr(doctor.platform, "python_version", lambda: "3.10.4")
    found = levels()
    assert {n for n, level in found.items() if level == "missing"} == {"python", "torch", "solver"}
    assert found["transformers"] == "warn"
    result = run("doctor")
    assert result.exit_code == 1
    assert result.stdout.endswith("\nmissing: python, torch, solver\n")
    for advice in ("use Python 3.11 or newer", "pip install --upgrade 'torch>=2.11'", "pip install highspy pulp"):
        assert f"-> {advice}" in result.stdout


def test_doctor_starts_gloo(healthy: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object) -> None:
        raise RuntimeError("unable to resolve hostname")

    monkeypatch.setattr("torch.distributed.ProcessGroupGloo", fails)
    (check,) = [c for c in doctor.examine() if c.name == "gloo"]
    assert check.level == "missing" and "unable to resolve" in check.found and "GLOO_SOCKET_IFNAME" in check.advice


@pytest.mark.parametrize(
    ("variables", "name", "words"),
    [
        ({"OMP_NUM_THREADS": ""}, "OMP_NUM_THREADS", "export OMP_NUM_THREADS= cores / ranks"),
        ({"OMP_NUM_THREADS": "many"}, "OMP_NUM_THREADS", "export OMP_NUM_THREADS="),
        ({"OMP_NUM_THREADS": "8", "LOCAL_WORLD_SIZE": "4"}, "OMP_NUM_THREADS", "export OMP_NUM_THREADS=2,"),
        ({"OMP_NUM_THREADS": "", "LOCAL_WORLD_SIZE": "16"}, "OMP_NUM_THREADS", "export OMP_NUM_THREADS=1,"),
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE", "torchrun"),
    ],
)
def test_doctor_warns(
    healthy: None, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], name: str, words: str
) -> None:
    monkeypatch.setattr(doctor, "usable_cores", lambda: 8)
    for key, value in variables.items():
        monkeypatch.setenv(key, value)
    (check,) = [c for c in doctor.examine() if c.name == name]
    assert check.level == "warn" and words in check.advice
    assert run("doctor").exit_code == 0


@pytest.mark.parametrize(
    ("version", "good"), [("2.13.0+cpu", True), ("2.11", True), ("2.9.1", False), ("3.0.0a0", True), ("1.13", False)]
)
def test_versions(version: str, good: bool) -> None:
    assert doctor._at_least(version, (2, 11)) == good


# ------------------------------------------------------------------------------------------------ progress


def test_progress_is_for_a_terminal_and_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    import io

    from rich.console import Console

    monkeypatch.delenv("RANK", raising=False)
    with progress_line(Console(file=io.StringIO())) as report:
        assert report is None
    screen = io.StringIO()
    with progress_line(Console(file=screen, force_terminal=True, width=80)) as report:
        assert report is not None
        report("[solve] 412 ms, bound 400")
    assert "[solve] 412 ms, bound 400" in screen.getvalue()
    monkeypatch.setenv("RANK", "1")
    with progress_line(Console(file=io.StringIO(), force_terminal=True)) as report:
        assert report is None
