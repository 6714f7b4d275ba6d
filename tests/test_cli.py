"""The command line as a user meets it: exit codes, one line per mistake, nothing imported that is not needed."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from swiftkv import __version__
from swiftkv.cli import app
from tests.support.checkpoints import make_checkpoint, rewrite_config
from tests.support.hf_configs import LLAMA
from tests.support.interruptible import interruptible
from tests.support.quantized import as_int8, store_projections, storing

MULTI_HEAD = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Complete as far as names go; an engine could not load it."""
    directory = tmp_path / "tiny"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(MULTI_HEAD))
    (directory / "model.safetensors").touch()
    (directory / "tokenizer.json").touch()
    return directory


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def write(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "node.yaml"
    file.write_text(text)
    return file


@pytest.mark.parametrize("command", ["serve", "plan"])
def test_a_mistake_in_the_file_is_a_line_on_stderr_and_code_2(command: str, tmp_path: Path, checkpoint: Path) -> None:
    file = write(tmp_path, f"models: [{{name: a, path: {checkpoint}, kv_cahe: {{}}}}]")
    result = run(command, file)
    assert result.exit_code == 2
    assert result.stderr == f"{file}: models[0].kv_cahe: unknown key; did you mean kv_cache?\n"
    assert result.stdout == ""


def test_a_mistake_about_a_checkpoint_is_a_line_on_stderr_and_code_2(tmp_path: Path, checkpoint: Path) -> None:
    file = write(tmp_path, f"models: [{{name: a, path: {checkpoint}, max_model_len: 4096}}]")
    result = run("serve", file)
    assert result.exit_code == 2
    expected = "models[0].max_model_len: 4096 is more than the 512 positions that the model has"
    assert result.stderr == f"{file}: {expected}\n"


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    result = run("plan", tmp_path / "no.yaml")
    assert result.exit_code == 2
    assert result.stderr.startswith(f"{tmp_path / 'no.yaml'}: cannot be read: No such file or directory")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("where", ["node.port", "models[0].endpoint.port"])
def test_a_port_in_use_is_a_line_and_nothing_starts(where: str, tmp_path: Path, checkpoint: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        node_port, model_port = (port, 0) if where == "node.port" else (0, port)
        file = write(
            tmp_path,
            f"node: {{port: {node_port}}}\nmodels: [{{name: a, path: {checkpoint}, endpoint: {{port: {model_port}}}}}]",
        )
        result = run("serve", file)
    assert result.exit_code == 2
    expected = (
        f"{where}: cannot listen on 127.0.0.1:{port}: Address already in use; choose another port or free this one"
    )
    assert result.stderr == f"{file}: {expected}\n"
    assert result.stdout == ""


def test_options_replace_what_the_file_says(tmp_path: Path, checkpoint: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        file = write(tmp_path, f"node: {{port: 0}}\nmodels: [{{name: a, path: {checkpoint}}}]")
        port = taken.getsockname()[1]
        assert f"127.0.0.1:{port}: Address already in use" in run("serve", file, "--port", str(port)).stderr
    assert "node.port: 70000 is not a port number" in run("serve", file, "--port", "70000").stderr
    anybody = "--allow-unauthenticated"
    assert "node.host: 'no such host' is not an address" in run("serve", file, "--host", "no such host", anybody).stderr


def test_a_key_that_is_named_must_be_set(tmp_path: Path, checkpoint: Path) -> None:
    file = write(
        tmp_path, f"node: {{port: 0, api_key_env: SWIFTKV_TEST_NO_KEY}}\nmodels: [{{name: a, path: {checkpoint}}}]"
    )
    result = run("serve", file)
    assert result.exit_code == 2
    assert "node.api_key_env: the environment variable SWIFTKV_TEST_NO_KEY is not set" in result.stderr


def test_a_node_that_others_can_reach_wants_a_key(tmp_path: Path) -> None:
    """It is refused before the model is looked for."""
    file = write(tmp_path, "node: {port: 0}\nmodels: [{name: a, path: nowhere}]")
    result = run("serve", file, "--host", "0.0.0.0")
    assert result.exit_code == 2
    assert result.stderr.startswith(f"{file}: node.host: 0.0.0.0 can be reached from other machines")
    assert "node.api_key_env" in result.stderr
    assert "--allow-unauthenticated" in result.stderr
    allowed = run("serve", file, "--host", "0.0.0.0", "--allow-unauthenticated")
    assert "models[0].path: 'nowhere' is neither a directory" in allowed.stderr


def test_a_device_that_is_not_served(tmp_path: Path, checkpoint: Path) -> None:
    file = write(tmp_path, f"node: {{port: 0}}\nmodels: [{{name: a, path: {checkpoint}, device: 'cuda:0'}}]")
    result = run("serve", file)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"{file}: models[0].device: cuda:0 cannot be used: ")


def test_plan_as_table_and_as_json(tmp_path: Path, checkpoint: Path) -> None:
    file = write(tmp_path, f"models: [{{name: tiny-model, path: {checkpoint}, kv_cache: {{memory: 1MiB}}}}]")
    table = run("plan", file)
    assert table.exit_code == 0
    assert "tiny-model" in table.stdout
    assert "85 of 16 tokens" in table.stdout
    planned = json.loads(run("plan", file, "--json").stdout)["models"]
    assert [(model["name"], model["num_blocks"]) for model in planned] == [("tiny-model", 85)]


def test_plan_shows_quantized_weights_beside_their_unpacked_size(tmp_path: Path) -> None:
    directory = tmp_path / "tiny"
    make_checkpoint(directory, "llama")
    store_projections(directory, storing(as_int8, bits=8))
    weights = {"weights": {"num_bits": 8, "type": "int"}}
    quantization = {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {"all": weights}}
    rewrite_config(directory, quantization_config=quantization)
    for dtype, quantized in (("bfloat16", True), ("float32", False)):
        options = f"dtype: {dtype}, kv_cache: {{memory: 1MiB}}"
        file = write(tmp_path, f"models: [{{name: a, path: {directory}, {options}}}]")
        (row,) = [line for line in run("plan", file).stdout.splitlines() if line.startswith("weights ")]
        (planned,) = json.loads(run("plan", file, "--json").stdout)["models"]
        assert ("quantized" in row, dtype in row) == (quantized, True)
        assert (planned["weight_bytes"] < planned["unpacked_weight_bytes"]) == quantized


def test_plan_shows_the_host_memory_of_a_model_on_a_gpu(tmp_path: Path, checkpoint: Path) -> None:
    """Its pool is a part of the GPU, and not known yet."""
    options = "device: 'cuda:0', kv_cache: {memory: 60%}, tiers: {host: {size: 8MiB}}"
    file = write(tmp_path, f"models: [{{name: a, path: {checkpoint}, {options}}}]")
    table = run("plan", file)
    assert table.exit_code == 0, table.stderr
    rows = [line.split()[:3] for line in table.stdout.splitlines()]
    assert ["host", "memory", "8MiB:"] in rows
    assert ["page-locked", "96MiB"] in rows
    (planned,) = json.loads(run("plan", file, "--json").stdout)["models"]
    assert (planned["host_bytes"], planned["page_locked_bytes"]) == (8 << 20, 96 << 20)


@pytest.mark.parametrize("command", ["plan", "serve"])
@pytest.mark.parametrize(
    ("section", "warning"),
    [
        ("kv_cache: {memory: 50KiB}", "kv_cache.memory, 48KiB, holds only 64 tokens; raise kv_cache.memory (6MiB hold"),
        ("kv_cache: {memory: 50KiB}, max_model_len: 64", "kv_cache.memory, 48KiB, holds only 64 tokens; raise"),
        ("kv_cache: {memory: 1MiB}", "takes 1,360 tokens of the 8,192 that the model was made for; raise"),
        ("kv_cache: {memory: 1MiB}, max_model_len: 1024", ""),
        ("kv_cache: {memory: 3MiB}", ""),
    ],
)  # fmt: skip
def test_a_context_far_below_the_model_s_is_warned_about(
    section: str, warning: str, command: str, tmp_path: Path, checkpoint: Path
) -> None:
    (checkpoint / "config.json").write_text(json.dumps({**MULTI_HEAD, "max_position_embeddings": 8192}))
    file = write(tmp_path, f"node: {{port: 0}}\nmodels: [{{name: a, path: {checkpoint}, {section}}}]")
    done = subprocess.run([sys.executable, "-m", "swiftkv", command, str(file)], capture_output=True, text=True)
    warnings = [line for line in done.stdout.splitlines() if "raise kv_cache.memory" in line]
    assert len(warnings) == bool(warning)
    assert "".join(warnings).startswith(f"a: {warning}" if warning else "")


def test_what_is_larger_than_the_machine_is_planned_and_not_served(tmp_path: Path, checkpoint: Path) -> None:
    file = write(tmp_path, f"node: {{port: 0}}\nmodels: [{{name: a, path: {checkpoint}, kv_cache: {{memory: 64TiB}}}}]")
    planned, served = run("plan", file), run("serve", file)
    assert planned.exit_code == 0
    assert "\nthis machine cannot serve it: kv_cache.memory: a: pools of 64TiB and weights of" in planned.stdout
    assert served.exit_code == 2
    assert served.stderr.startswith(f"{file}: kv_cache.memory: a: pools of 64TiB and weights of")


def test_plan_shows_what_each_master_can_borrow(tmp_path: Path, checkpoint: Path) -> None:
    models = [
        f"{{name: one, path: {checkpoint}, role: master, kv_cache: {{memory: 1MiB}}}}",
        f"{{name: two, path: {checkpoint}, role: master, kv_cache: {{memory: 2MiB}}}}",
        f"{{name: lender, path: {checkpoint}, kv_cache: {{memory: 1MiB}}, lending: {{budget: 50%}}}}",
        f"{{name: keeper, path: {checkpoint}}}",
    ]
    file = write(tmp_path, f"models: [{', '.join(models)}]")
    table = run("plan", file)
    assert table.exit_code == 0
    for text in ("one borrows (every budget is divided among 2 masters):", "two borrows", "the LCM", "21 of 42"):
        assert text in table.stdout
    assert "- keeper lends nothing: it has no lending.budget" in table.stdout
    assert "- one itself was made for 512 tokens" in table.stdout
    masters = json.loads(run("plan", file, "--json").stdout)["lending"]["masters"]
    assert [master["master"] for master in masters] == ["one", "two"]
    assert [pair["k_i"] for pair in masters[0]["pairs"]] == [21, 0]
    file.write_text(f"node: {{lending: off}}\nmodels: [{', '.join(models)}]")
    assert "Nothing is lent: node.lending is off." in run("plan", file).stdout


def test_plan_and_help_do_without_torch(tmp_path: Path, checkpoint: Path) -> None:
    file = write(tmp_path, f"models: [{{name: a, path: {checkpoint}}}]")
    program = (
        "import sys\n"
        "from swiftkv.cli import app\n"
        "for arguments in (['--help'], ['serve', '--help'], ['plan', sys.argv[1]]):\n"
        "    app(arguments, standalone_mode=False)\n"
        "print({'torch', 'transformers', 'fastapi'} & set(sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", program, file], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"


def test_version_and_help() -> None:
    assert run("--version").stdout == f"swiftkv {__version__}\n"
    for command in ([], ["serve"], ["plan"], ["chat"], ["status"], ["checkpoint", "make"], ["bench", "serve"]):
        result = run(*command, "--help")
        assert result.exit_code == 0, command
        assert "swiftkv" in result.stdout


def test_shells_complete_commands() -> None:
    """A shell asks like this, with what `swiftkv --install-completion` puts into its start-up file."""
    words = {"_SWIFTKV_COMPLETE": "complete_bash", "COMP_WORDS": "swiftkv mod", "COMP_CWORD": "1"}
    asked = CliRunner(env=words).invoke(app, prog_name="swiftkv")
    assert asked.stdout.split() == ["models"]


def test_status_of_no_node() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    result = run("status", "--url", f"http://127.0.0.1:{port}")
    assert result.exit_code == 1
    assert result.stderr.startswith(f"swiftkv: no node answers at http://127.0.0.1:{port}: ")


def test_a_simulation_asks_the_environments_node(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    monkeypatch.setenv("SWIFTKV_URL", url)
    file = write(tmp_path, f"models: [{{name: a, path: {checkpoint}}}]")
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 8, "output_length": 2, "hash_ids": [1]}\n')
    result = run("simulate", file, "--trace", trace)
    assert result.exit_code == 2
    assert f"--step-time: no node answers at {url}: " in result.stderr


def test_an_endless_interval() -> None:
    result = run("top", "--once", "--interval", "inf")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "--interval" in result.stderr


def test_a_negative_seed(tmp_path: Path) -> None:
    result = run("simulate", tmp_path / "node.yaml", "--trace", tmp_path / "trace.jsonl", "--seed", "-1")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "--seed" in result.stderr


@pytest.mark.parametrize("option", ["--target-ttft", "--target-tpot"])
@pytest.mark.parametrize("seconds", ["nan", "inf", "-1", "0"])
def test_a_target_that_no_request_can_have(tmp_path: Path, option: str, seconds: str) -> None:
    result = run("simulate", tmp_path / "node.yaml", "--trace", tmp_path / "trace.jsonl", option, seconds)
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"{seconds} is not a number of seconds above 0" in result.stderr
    assert option in result.stderr


ASKING_COMMANDS = [
    ["status"],
    ["lending", "show"],
    ["top", "--once"],
    ["chat", "-q", "Hello!"],
    ["simulate", "{file}", "--trace", "{trace}"],
    ["bench", "serve", "--num-prompts", "1"],
]


@pytest.mark.parametrize("command", ASKING_COMMANDS, ids=" ".join)
@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        ("SWIFTKV_URL", "http://127.0.0.1:port", "Invalid port"),
        ("SWIFTKV_URL", "http://127.0.0.1:99999", "127.0.0.1:99999"),
        ("all_proxy", "socks5://127.0.0.1:1", "look at the environment variables http_proxy"),
        ("SSL_CERT_FILE", "/no/such/file", "look at the environment variables http_proxy"),
    ],
)
def test_an_environment_in_which_nothing_can_be_asked(
    command: list[str],
    variable: str,
    value: str,
    says: str,
    tmp_path: Path,
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if variable == "all_proxy" and importlib.util.find_spec("socksio"):
        pytest.skip("httpx can use this proxy here")
    monkeypatch.setenv(variable, value)
    file = write(tmp_path, f"models: [{{name: a, path: {checkpoint}}}]")
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 8, "output_length": 2, "hash_ids": [1]}\n')
    result = run(*(word.format(file=file, trace=trace) for word in command))
    assert result.exit_code in (1, 2), result.exception
    assert isinstance(result.exception, SystemExit)
    assert says in result.stderr
    assert result.stderr.count("\n") == 1


class _AnswersAnything(BaseHTTPRequestHandler):
    content = b""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(self.content)))
        self.end_headers()
        self.wfile.write(self.content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("command", ASKING_COMMANDS, ids=" ".join)
@pytest.mark.parametrize("content", [b"{}", b"[]", b"null", b"<html>", b"\xff"])
def test_a_server_that_is_no_node(command: list[str], content: bytes, tmp_path: Path, checkpoint: Path) -> None:
    file = write(tmp_path, f"models: [{{name: a, path: {checkpoint}}}]")
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 8, "output_length": 2, "hash_ids": [1]}\n')
    handler = type("Handler", (_AnswersAnything,), {"content": content})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        environment = os.environ | {"SWIFTKV_URL": f"http://127.0.0.1:{server.server_port}", "SWIFTKV_ADMIN_KEY": "key"}
        words = [word.format(file=file, trace=trace) for word in command]
        done = subprocess.run(
            [sys.executable, "-m", "swiftkv", *words], capture_output=True, text=True, env=environment
        )
        server.shutdown()
    assert done.returncode in (1, 2)
    assert "Traceback" not in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


def test_a_url_may_lack_its_scheme(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    by_flag = run("status", "--url", address)
    monkeypatch.setenv("SWIFTKV_URL", address)
    for result in (by_flag, run("lending", "show")):
        assert result.exit_code == 1
        assert result.stderr.startswith(f"swiftkv: no node answers at http://{address}: "), result.stderr
        assert "protocol" not in result.stderr


def test_status_of_a_node_that_does_not_answer_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node listens from its first second on, and answers once it has loaded its tokenizers."""
    monkeypatch.setattr("swiftkv.cli._STATUS_TIMEOUT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        result = run("status", "--url", url)
    assert result.exit_code == 1
    assert result.stderr == f"swiftkv: the node at {url} is starting or busy: it did not answer in time; try again\n"


def test_a_model_that_cannot_be_loaded_ends_the_start(tmp_path: Path, checkpoint: Path) -> None:
    """Every name is there, no file is what it says: only the engine can tell."""
    file = write(tmp_path, f"node: {{port: 0}}\nmodels: [{{name: a, path: {checkpoint}}}]")
    done = subprocess.run(
        [sys.executable, "-m", "swiftkv", "serve", str(file)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("swiftkv: ")


INTERRUPT_AN_IMPORT = """
import os, sys

class Interrupting:
    def __del__(self):  # as in an extension module that calls Python, exceptions would be printed and ignored here
        os.kill(os.getpid(), signal.SIGINT)

class Interrupter:
    def find_spec(self, name, *_):
        if name == "swiftkv.cli":
            Interrupting()

sys.meta_path.insert(0, Interrupter())
"""


def test_ctrl_c_while_the_command_is_imported() -> None:
    command = interruptible("--version", before=INTERRUPT_AN_IMPORT)
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize(
    ("redirection", "code", "stderr"),
    [
        (">/dev/full", 1, "swiftkv: standard output cannot be written: No space left on device\n"),
        (">&-", 0, ""),
        ("| exec true", 1, ""),
    ],
)
def test_standard_output_that_cannot_be_written(redirection: str, code: int, stderr: str, tmp_path: Path) -> None:
    """It is so for text that is written only at the end, too."""
    status = tmp_path / "status"
    for command in ("--help", "--version"):
        shell = f'{{ "$@"; echo $? >"$0"; }} {redirection}'
        arguments = [status, sys.executable, "-m", "swiftkv", command]
        done = subprocess.run(["sh", "-c", shell, *arguments], capture_output=True, text=True)
        assert (status.read_text(), done.stdout, done.stderr) == (f"{code}\n", "", stderr)
