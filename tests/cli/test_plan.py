"""`amsp plan` from the outside: answers, files, exit codes, and one clear line for everything that is wrong."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from deepspeed_amsp.cli.app import app
from deepspeed_amsp.cli.show import show
from deepspeed_amsp.config import read_block
from deepspeed_amsp.plan import explain
from deepspeed_amsp.plan.api import Request
from deepspeed_amsp.plan.resolve import make_plan
from deepspeed_amsp.plan.solver import search
from tests.plan.planning import measured_problem

ROOT = Path(__file__).resolve().parents[2]

TINY = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 4096,
}
JOB = ["--nodes", "2", "--gpus-per-node", "4", "--seq-len", "512", "--global-batch-tokens", str(512 * 8 * 4)]


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY))
    return str(path)


def amsp(*arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout, stderr."""
    done = CliRunner().invoke(app, ["plan", *arguments])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exc_info
    return done.exit_code, done.stdout, done.stderr


def answer(*arguments: str) -> dict[str, Any]:
    code, out, err = amsp(*arguments, "--json")
    assert code in (0, 2), err
    return json.loads(out)


# --- answers --------------------------------------------------------------------------------------------------


def test_text_has_the_plan_and_the_block(model: str) -> None:
    code, out, _ = amsp("--model", model, *JOB)
    assert code == 0
    for title in ("The best plan, and all within", "Memory of", "Step time of", "Not chosen", "ds_config"):
        assert title in out
    block = json.loads(out[out.index("ds_config\n") + len("ds_config\n") :])
    assert read_block(block) is not None and block["gradient_accumulation_steps"] == 4


def test_json_is_the_same_answer(model: str) -> None:
    found = answer("--model", model, *JOB)
    hidden, ffn, vocab = 256, 704, 4096
    assert (
        found["model"]["parameters"]
        == 4 * (4 * hidden**2 + 3 * hidden * ffn + 2 * hidden) + 2 * vocab * hidden + hidden
    )
    assert found["fits"] and found["ds_config"]["zero_optimization"]["stage"] == found["best"]["stage"]
    assert len(found["not_chosen"]) == found["space"]["searched"] - 1


def test_markdown_is_one_page(model: str) -> None:
    code, out, _ = amsp("--model", model, *JOB, "--markdown")
    assert code == 0 and out.startswith("# amsp plan\n") and out.count("```") == 2


def test_everything_is_listed_if_asked(model: str) -> None:
    found = answer("--model", model, *JOB, "--all")
    assert len(found["illegal"]) + found["space"]["ordered"] == found["space"]["raw"] == (3 * 2) ** 3


def test_sensitivity_and_crossover(model: str) -> None:
    code, out, _ = amsp("--model", model, *JOB, "--sensitivity", "--crossover")
    assert code == 0
    assert out.count("bandwidth +50.0 %") == 2 and "memory -50.0 %" in out
    assert "  16,384" in out and "M shrinks as GPUs grow, down to 1" in out


def test_a_named_sharding_is_priced(model: str) -> None:
    assert "4x2 | 4x2 | 4x2" in answer("--model", model, *JOB, "--sharding", "zero3")["asked_for"]


def test_options_change_what_they_say(model: str) -> None:
    plain = answer("--model", model, *JOB)
    changed = answer(
        "--model", model, *JOB, "--optimizer", "sgd", "--grad-dtype", "fp32", "--recompute", "--margin", "0.5",
        "--objective", "comm-time", "--gpu-memory", "40", "--profile", "h100-ndr", "--efficiency", "0.5",
    )  # fmt: skip
    (train,) = changed["trainings"]
    assert train["optimizer"] == "sgd" and train["gradient_bytes"] == 4 and train["recompute"]
    assert changed["capacity_bytes"] == 20e9 and changed["objective"] == "comm-time"
    assert changed["cluster"]["peak_flops"] == 989e12 and changed["cluster"]["efficiency"] == 0.5
    assert plain["capacity_bytes"] == 80e9  # the profile's


def test_tensor_and_pipeline_parallelism_leave_the_rest(model: str) -> None:
    found = answer("--model", model, "--nodes", "2", "--gpus-per-node", "4", "--tp", "2", "--pp", "2")
    assert found["best"]["data_parallel"] == [2, 1]


def test_micro_batches_are_chosen(model: str) -> None:
    found = answer("--model", model, *JOB, "--micro-batch", "auto")
    assert sorted({train["micro_batch"] for train in found["trainings"]}) == [1, 2, 4]
    assert all(train["micro_batch"] * train["micro_batches"] == 4 for train in found["trainings"])


@pytest.mark.parametrize(("width", "says"), [(60, "P | G | OS 1x1"), (300, "│ 1x1 | 1x1")])
def test_a_terminal_is_never_overrun(width: int, says: str, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    found = search(Request(model, nodes=2, gpus_per_node=4, seq_len=512).problem())
    written = io.StringIO()
    written.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr("sys.stdout", written)
    show(explain.overview(found), [explain.best_table(found), explain.memory_table(found)])
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in written.getvalue().splitlines()]
    assert max(map(len, lines)) <= width and any(says in line for line in lines)


# --- nothing fits ---------------------------------------------------------------------------------------------


def test_nothing_fits_is_exit_code_2_with_what_would(model: str, tmp_path: Path) -> None:
    target = tmp_path / "new.json"
    arguments = ("--model", model, *JOB, "--gpu-memory", "0.05", "--grad-dtype", "fp32")
    code, out, _ = amsp(*arguments, "--write", str(target))
    assert code == 2 and "Nothing fits: the smallest need is" in out and "its largest term is" in out
    assert "What would fit, cheapest first" in out and not target.exists()
    found = answer(*arguments)
    costs = [remedy["gpu_seconds_per_token"] for remedy in found["would_fit"]]
    assert costs == sorted(costs) and costs
    memory = next(r["option"].split() for r in found["would_fit"] if r["option"].startswith("--gpu-memory"))
    assert amsp("--model", model, *JOB, "--grad-dtype", "fp32", *memory)[0] == 0


# --- files ----------------------------------------------------------------------------------------------------


def test_it_writes_a_new_config_that_the_engine_takes(model: str, tmp_path: Path) -> None:
    target = tmp_path / "new.json"
    found = answer("--model", model, *JOB, "--write", str(target))
    block = read_block(json.loads(target.read_text()))
    assert block is not None
    assert make_plan(block, 8, 4).sharding.as_dict() == found["best"]["sharding"]


def test_it_reads_and_writes_an_existing_config(model: str, tmp_path: Path) -> None:
    path, hosts = tmp_path / "ds.json", tmp_path / "hosts"
    hosts.write_text("# two\r\nnode1 slots=4\r\n\r\nnode2 slots=4  # the other\r\n")
    config = {
        "train_batch_size": 64, "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "Lion", "params": {"lr": 0.5}}, "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": {"stage": 3, "reduce_bucket_size": 1000000},
        "amsp": {"sharding": "zero3", "verify_every": 5, "memory_limit_gb": 30, "overlap": {"publish": False}},
    }  # fmt: skip
    path.write_text(json.dumps(config))
    found = answer("--model", model, "--config", str(path), "--hostfile", str(hosts), "--write", str(path))
    (train,) = found["trainings"]
    assert (train["micro_batch"], train["micro_batches"]) == (2, 4)
    assert train["optimizer"] == "lion" and train["gradient_bytes"] == 4
    assert found["capacity_bytes"] == 30e9 and "4x2 | 4x2 | 4x2" in found["asked_for"]
    text = path.read_text()
    written = json.loads(text)
    assert '"gradient_clipping": 1.0' in text and '"optimizer_states": [' in text
    assert {key: written[key] for key in ("train_batch_size", "optimizer", "data_types")} == {
        key: config[key] for key in ("train_batch_size", "optimizer", "data_types")
    }
    assert written["amsp"]["verify_every"] == 5 and written["amsp"]["overlap"]["publish"] is False
    assert written["amsp"]["bucket_bytes"] == 2_000_000
    assert written["zero_optimization"] == {"stage": found["best"]["stage"], "reduce_bucket_size": 1000000}


BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
BATCHES: list[tuple[tuple[Any, Any, Any], list[str], tuple[int, int] | str]] = [
    ((64, None, 2), [], (4, 2)),
    ((64, 2, None), [], (2, 4)),
    ((None, 2, 3), [], (2, 3)),
    ((64, None, None), [], (8, 1)),
    ((64, "auto", "auto"), [], (8, 1)),
    ((64, 4, 2), [], (4, 2)),
    ((64, 4, 2), ["--micro-batch", "2"], (2, 4)),
    ((64, None, None), ["--micro-batch", "auto"], "all"),
    ((64, 4, 3), [], "train_batch_size 64 is not micro-batch 4 x gradient_accumulation_steps 3 x 8 replicas"),
    ((60, None, 2), [], "train_batch_size 60 is no multiple of 16: gradient_accumulation_steps 2 on 8 replicas"),
]


@pytest.mark.parametrize(("numbers", "options", "right"), BATCHES)
def test_two_numbers_of_a_batch_give_the_third(
    numbers: tuple[Any, ...], options: list[str], right: tuple[int, int] | str, model: str, tmp_path: Path
) -> None:
    path = tmp_path / "ds.json"
    given = {key: value for key, value in zip(BATCH, numbers, strict=True) if value is not None}
    path.write_text(json.dumps({"bf16": {"enabled": "auto"}, **given}))
    job = ["--model", model, *JOB[:6], "--config", str(path), *options]
    if right == "all":
        sizes = {(train["micro_batch"], train["micro_batches"]) for train in answer(*job)["trainings"]}
        assert sizes == {(1, 8), (2, 4), (4, 2), (8, 1)}
        return
    if isinstance(right, str):
        code, _, err = amsp(*job)
        assert code == 1 and right in err
        return
    (train,) = answer(*job)["trainings"]
    assert (train["micro_batch"], train["micro_batches"]) == right


def test_without_a_16_bit_section_a_config_trains_in_fp32(model: str, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero_optimization": {"reduce_bucket_size": 1000}, "bf16": {"enabled": False}}))
    found = answer("--model", model, *JOB, "--config", str(path))
    (train,) = found["trainings"]
    assert (train["parameter_bytes"], train["gradient_bytes"]) == (4, 4)
    assert found["ds_config"]["amsp"]["bucket_bytes"] == 4000


@pytest.mark.parametrize("read", [False, True], ids=["written only", "read too"])
def test_nothing_in_an_existing_config_contradicts_the_plan(read: bool, model: str, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    block = {"enabled": read, "overlap": {"gather": True}, "keep_after_forward": "all", "verify_every": 3}
    path.write_text(json.dumps({"zero_optimization": {"stage": 3, "overlap_comm": False}, "amsp": block}))
    answer("--model", model, *JOB, *(["--config", str(path)] if read else []), "--write", str(path))
    written = json.loads(path.read_text())["amsp"]
    others = dict.fromkeys(("reduce_scatter", "all_reduce", "publish"), not read)
    assert written["overlap"] == {"gather": True, **others}
    assert (written["enabled"], written["verify_every"]) == (True, 3)
    assert written["keep_after_forward"] == ("all" if read else "none")


def test_zero_settings_that_the_engine_takes_are_planned_with(model: str, tmp_path: Path) -> None:
    """By `config_zero`: prefetch and reuse in elements of 2 bytes, both within max_live_parameters; persistence is not
    counted, and said."""
    path = tmp_path / "ds.json"
    zero = {"stage3_max_live_parameters": 3000, "stage3_max_reuse_distance": 4000, "stage3_prefetch_bucket_size": 9000}
    path.write_text(json.dumps({"bf16": {"enabled": True}, "zero_optimization": {"stage": 3, **zero}}))
    found = answer("--model", model, *JOB, "--config", str(path), "--write", str(path))
    written = json.loads(path.read_text())
    assert written["amsp"] == found["ds_config"]["amsp"]
    assert (written["amsp"]["prefetch_bytes"], written["amsp"]["keep_after_forward"]) == (6000, 4000)
    path.write_text(json.dumps({"zero_optimization": {"stage": 3, "param_persistence_threshold": 1000}}))
    code, _, err = amsp("--model", model, *JOB, "--config", str(path))
    assert code == 0 and "param_persistence_threshold" in err and "are counted without" in err


def test_who_writes_into_a_file_plans_with_what_it_trains_with(model: str, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    config = {"gradient_clipping": 0.0, "optimizer": {"type": "Lion"}}
    path.write_text(json.dumps(config))
    (train,) = answer("--model", model, *JOB, "--write", str(path))["trainings"]
    assert (train["parameter_bytes"], train["gradient_bytes"]) == (4, 4)
    assert (train["optimizer"], train["gradient_clipping"]) == ("lion", False)
    assert json.loads(path.read_text()).items() >= config.items()
    # An option goes before the file, and into it where a plan may change it.
    (train,) = answer("--model", model, *JOB, "--write", str(path), "--grad-dtype", "bf16")["trainings"]
    assert train["gradient_bytes"] == 2
    assert json.loads(path.read_text())["data_types"] == {"grad_accum_dtype": "bf16"}


@pytest.mark.parametrize(
    ("config", "read", "options", "says"),
    [
        (
            {"optimizer": {"type": "Adam"}},
            False,
            ["--optimizer", "lion"],
            "optimizer adamw, where the plan is for lion",
        ),
        ({}, True, [], "parameter bytes 4, where the plan is for 2"),
        ({"bf16": {"enabled": True}, "gradient_clipping": 0}, True, [], "gradient clipping False"),
        (
            {"zero_optimization": {"max_live_parameters": 9}},
            False,
            [],
            "that make prefetch_bytes 36, where the plan is",
        ),
    ],
)
def test_a_file_that_would_train_otherwise_is_not_written(
    config: dict[str, Any], read: bool, options: list[str], says: str, model: str, tmp_path: Path
) -> None:
    path, other = tmp_path / "ds.json", tmp_path / "other.json"
    path.write_text(json.dumps(config))
    other.write_text('{"bf16": {"enabled": true}}')
    options = [*options, *(["--config", str(other)] if read else [])]
    code, out, err = amsp("--model", model, *JOB, "--write", str(path), *options)
    (line,) = err.splitlines()
    assert code == 1 and out == "" and line.startswith(f"amsp plan: error: --write: {path} has ") and says in line
    assert json.loads(path.read_text()) == config


def test_a_written_file_keeps_its_link_its_strings_and_its_name(model: str, tmp_path: Path) -> None:
    path, link = tmp_path / "ds_config.json", tmp_path / "link.json"
    path.write_text(json.dumps({"note": "use [ 4, 8 ] here"}))
    link.symlink_to(path)
    answer("--model", model, *JOB, "--write", str(link))
    assert link.is_symlink() and json.loads(path.read_text())["note"] == "use [ 4, 8 ] here"


def test_a_locale_without_the_letters_of_a_name(model: str, tmp_path: Path) -> None:
    folder = tmp_path / "m\u00fcnchen"
    folder.mkdir()
    (folder / "config.json").write_text(Path(model).read_text())
    done = CliRunner(charset="ascii").invoke(app, ["plan", "--model", str(folder), *JOB])
    assert done.exit_code == 0 and "m\\xfcnchen" in done.stdout


def test_a_profile_of_fewer_nodes_needs_to_be_told(model: str, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    replace(measured_problem().profile, name="mine").save(path)
    job = ["--model", model, "--nodes", "8", "--gpu-memory", "80", "--profile", str(path)]
    code, _, err = amsp(*job)
    assert code == 1 and "--extrapolate" in err
    found = answer(*job, "--extrapolate", "--sharding", "zero3")
    assert any("outside the measured meshes" in why for why in found["best"]["extrapolated"])


def test_an_option_goes_before_the_files(model: str, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "Adam"}}')
    found = answer("--model", model, *JOB, "--config", str(path), "--micro-batch", "4", "--optimizer", "muon")
    assert found["trainings"][0]["micro_batch"] == 4 and found["trainings"][0]["optimizer"] == "muon"


def test_it_draws(model: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "plan.png"
    assert amsp("--model", model, *JOB, "--plot", str(picture))[0] == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_one_line(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, _, err = amsp("--model", model, *JOB, "--plot", str(tmp_path / "plan.png"))
    assert code == 1 and err.startswith("amsp plan: error: --plot needs matplotlib: pip install")


def test_a_module_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_model.py").write_text("import torch\ndef make():\n    return torch.nn.Linear(30, 20)\n")
    code, out, err = amsp("--model", "own_model:make", "--nodes", "1", "--gpus-per-node", "2", "--json")
    assert code == 0, err
    assert json.loads(out)["model"]["parameters"] == 30 * 20 + 20


# --- what is wrong --------------------------------------------------------------------------------------------

WRONG: list[tuple[list[str], str]] = [
    (["--nodes", "1"], "--model: is needed"),
    (["--model", "{model}"], "--nodes: is needed"),
    (["--model", "llama-8b", "--nodes", "1"], "did you mean llama-"),
    (["--model", "{folder}/no.json", "--nodes", "1"], "{folder}/no.json"),
    (["--model", "{folder}/text", "--nodes", "1"], "is not JSON"),
    (["--model", "{folder}/list", "--nodes", "1"], "is not the config of a model"),
    (["--model", "no_module_of_that_name:make", "--nodes", "1"], "cannot be imported"),
    (["--model", "llama-7b", "--nodes", "1", "--probe"], "--probe: the activations of llama-7b are measured"),
    (["--nodes", "0"], "--nodes: must be a whole number of at least 1, not 0"),
    (["--nodes", "two"], "--nodes: must be a whole number, not 'two'"),
    (["--gpus-per-node", "0"], "--gpus-per-node: must be a whole number of at least 1"),
    (["--gpus-per-node", "3", "--sharding", "2x1,2x1,2x1"], "breaks the rule 'divisibility'"),
    (["--gpus-per-node", "3", "--sharding", "1,1,2"], "legal values are 1, 3"),
    (["--sharding", "zero33"], "did you mean zero3?"),
    (["--sharding", "1,1"], "neither a name nor three factors"),
    (["--gpu-memory", "81920"], "--gpu-memory: 81920 looks like MB"),
    (["--gpu-memory", "85899345920"], "looks like bytes"),
    (["--gpu-memory", "nan"], "--gpu-memory: must be a number of GB above 0"),
    (["--gpu-memory", "-1"], "--gpu-memory: must be a number of GB above 0"),
    (["--seq-len", "0"], "--seq-len: must be"),
    (["--micro-batch", "0"], '--micro-batch: must be a whole number of at least 1 or "auto"'),
    (["--micro-batch", "Auto"], "--micro-batch: must be a whole number"),
    (["--micro-batch", "auto"], "--global-batch-tokens: is needed"),
    (["--global-batch-tokens", "100000", "--gpus-per-node", "8"], "Nearest: 98304 or 131072 tokens"),
    (["--profile", "a800hdr"], "did you mean a800-hdr?"),
    (["--profile", "{folder}/empty.json"], "is empty"),
    (["--profile", "{folder}/cut.json"], "was cut off"),
    (["--objective", "step"], "did you mean step-time?"),
    (["--optimizer", "adam"], "did you mean adamw?"),
    (["--grad-dtype", "fp8"], "--grad-dtype: 'fp8' is not one of bf16, fp16, fp32"),
    (["--tp", "3", "--gpus-per-node", "8"], "--tp = 3 must divide the 8 GPUs of a node"),
    (["--pp", "2"], "--pp = 2 must divide the 1 nodes"),
    (["--tp", "0"], "--tp: must be"),
    (["--margin", "10"], "--margin: must be a part of the memory"),
    (["--efficiency", "62"], "--efficiency: must be the part"),
    (["--config", "{folder}/no.json"], "no such file: {folder}/no.json"),
    (["--config", "{folder}/cut.json"], "is no JSON"),
    (["--config", "{folder}/list"], "must be an object"),
    (["--config", "{folder}/block.json"], "amsp.sharding"),
    (["--config", "{folder}/optimizer.json"], "optimizer 'OneBitAdam' is not known"),
    (["--config", "{folder}/zero.json"], "zero_optimization.max_live_parameters must be a whole number"),
    (["--hostfile", "{folder}/no"], "hostfile {folder}/no: cannot be read"),
    (["--hostfile", "{folder}/text"], "line 1"),
    (["--hostfile", "{folder}/uneven"], "(a: 4, b: 8). Plan for nodes that they can be cut into: --nodes 3"),
    (["--hostfile", "{folder}/twice"], "line 2: a stands there twice"),
    (["--hostfile", "{folder}/empty.json"], "names no host"),
    (["--write", "{folder}/cut.json"], "is no JSON"),
    (["--write", "{folder}/none/a.json"], "no such folder: {folder}/none"),
    (["--plot", "{folder}/a.jpg"], "--plot writes PNG"),
    (["--json", "--markdown"], "exclude each other"),
    (["--nods", "2"], "No such option: --nods"),
    (["--nodes"], "requires an argument"),
    (["more"], "unexpected extra argument"),
    (["--nodes", "1000000007"], "--nodes: 1000000007 x 8 GPUs are more than 1,000,000"),
    (["--seq-len", "9" * 40], "--seq-len: must be at most 1e+15, not 1.000e+40"),
    (["--sharding", "1,1,\u00b2"], "is no factor"),
    (["--hostfile", "{folder}/squared"], "line 1"),
    (["--write", "{folder}"], "--write: {folder} is not a file"),
    (["--model", "broken_at_import:make", "--nodes", "1"], "cannot be imported: ZeroDivisionError: division by zero"),
    (["--model", "LLaMA-7B", "--nodes", "1", "--probe"], "--probe: the activations of LLaMA-7B are measured"),
]


@pytest.mark.parametrize(("arguments", "says"), WRONG, ids=[" ".join(arguments) for arguments, _ in WRONG])
def test_what_is_wrong_is_said_in_one_line(
    arguments: list[str], says: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    files = {
        "text": "not JSON", "list": "[1]", "empty.json": "", "cut.json": '{"version": 1, "na',
        "uneven": "a slots=4\nb slots=8\n", "twice": "a slots=4\na slots=4\n",
        "squared": "a slots=\u00b2\n", "broken_at_import.py": "1 / 0\n",
        "block.json": '{"amsp": {"sharding": "zero9"}}', "optimizer.json": '{"optimizer": {"type": "OneBitAdam"}}',
        "zero.json": '{"zero_optimization": {"max_live_parameters": "all"}}',
    }  # fmt: skip
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    filled = [part.format(model=model, folder=tmp_path) for part in arguments]
    monkeypatch.chdir(tmp_path)
    if arguments not in (WRONG[0][0], WRONG[1][0]):
        for option, value in (("--model", model), ("--nodes", "1")):
            filled = [option, value, *filled] if option not in filled else filled
    code, out, err = amsp(*filled)
    assert code == 1 and out == ""
    (line,) = err.splitlines()
    assert line.startswith("amsp plan: error: ") and says.format(folder=tmp_path) in line
    assert (tmp_path / "cut.json").read_text() == files["cut.json"]


def test_a_named_model_needs_no_torch() -> None:
    check = (
        "import sys\nfrom typer.testing import CliRunner\nfrom deepspeed_amsp.cli.app import app\n"
        "done = CliRunner().invoke(app, ['plan', '--model', 'llama-7b', '--nodes', '1', '--gpus-per-node', '2'])\n"
        "assert done.exit_code == 0, done.output\n"
        "sys.exit(', '.join({'torch', 'deepspeed', 'matplotlib', 'numpy'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", check], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
