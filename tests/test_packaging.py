"""What is installed: the wheel's contents, the pins, and imports that leave others alone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

import outpace

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The project built as a user's pip builds it where there is no compiler."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    built = subprocess.run(
        [*command, "-w", str(folder), str(ROOT)],
        capture_output=True,
        text=True,
        env=os.environ | {"CXX": str(folder / "no-compiler")},
    )
    assert built.returncode == 0, built.stderr
    [path] = folder.glob("*.whl")
    return zipfile.ZipFile(path)


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> Message:
    name = f"outpace-{outpace.__version__}.dist-info/METADATA"
    return Parser().parsestr(wheel.read(name).decode())


def test_the_wheel_holds_the_package_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    source = {str(p.relative_to(ROOT / "src")) for p in (ROOT / "src/outpace").rglob("*.py*")}
    source = {name for name in source if name.endswith((".py", ".pyi"))}
    assert source | {"outpace/py.typed"} <= names
    rest = names - source - {"outpace/py.typed"}
    assert all(name.startswith(f"outpace-{outpace.__version__}.dist-info/") for name in rest)
    assert any(name.endswith("licenses/LICENSE") for name in rest)
    [entry_points] = [name for name in rest if name.endswith("entry_points.txt")]
    assert "outpace = outpace.cli:main" in wheel.read(entry_points).decode()


def test_the_metadata_states_versions_and_a_small_core(metadata: Message) -> None:
    assert metadata["Requires-Python"] in (">=3.10,<3.14", "<3.14,>=3.10")
    assert metadata["License-Expression"] == "Apache-2.0"
    requirements = metadata.get_all("Requires-Dist", [])
    core = {_name(r) for r in requirements if "extra ==" not in r}
    assert core == {
        "torch",
        "transformers",
        "tokenizers",
        "safetensors",
        "numpy",
        "filelock",
        "click",
        "rich",
    }
    assert set(metadata.get_all("Provides-Extra", [])) == {"gguf", "bench", "serve", "train", "dev"}


def test_the_constraints_pin_everything_that_the_tests_need(metadata: Message) -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all("==" in pin for pin in pins)
    requirements = metadata.get_all("Requires-Dist", [])
    needed = {_name(r) for r in requirements if not re.search("extra == .(bench|serve|train).", r)}
    assert {"pytest", "gguf", "torch"} <= needed <= {_name(pin) for pin in pins}
    assert "torch==2.13.0" in pins


def test_every_public_name_exists() -> None:
    assert len(outpace.__all__) == len({id(getattr(outpace, name)) for name in outpace.__all__})
    with pytest.raises(AttributeError, match="has no attribute 'lod'"):
        _ = outpace.lod  # type: ignore[attr-defined]


IMPORT_ALL = """
import importlib, pkgutil, outpace
for module in pkgutil.walk_packages(outpace.__path__, "outpace."):
    importlib.import_module(module.name)
"""


def test_57_no_import_needs_an_extra() -> None:
    extras = ("gguf", "matplotlib", "fastapi", "uvicorn", "prometheus_client", "scipy", "llm")
    block = f"import sys; sys.modules.update(dict.fromkeys({extras}))\n"
    done = _python(block + IMPORT_ALL)
    assert done.returncode == 0, done.stderr
    control = _python(block + "import gguf")
    assert "ModuleNotFoundError" in control.stderr


NO_NATIVE = """
import sys, tempfile
sys.modules["outpace.runtimes._native"] = None
import outpace
from tiny import build, byte_tokenizer
from outpace.runtimes.native import kernel_names
assert kernel_names() == []
folder = tempfile.mkdtemp()
build("llama").save_pretrained(folder)
byte_tokenizer(64).save_pretrained(folder)
"""


def test_57_without_the_native_part_everything_else_works() -> None:
    works = """
for method in ("plain", "lookup", "lookahead", "combined"):
    llm = outpace.load(folder, method=method)
    print(len(llm.generate("ABC", max_new_tokens=8, ignore_eos=True).tokens), llm.info()["trees"])
"""
    done = _python(NO_NATIVE + IMPORT_ALL + works)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["8 tree"] * 4
    refused = _python(NO_NATIVE + "outpace.load(folder, runtime='native')")
    assert "UnsupportedModel: outpace was installed without its native part" in refused.stderr
    assert "--runtime transformers" in refused.stderr.splitlines()[-1]


def test_57_a_missing_extra_is_told_when_it_is_needed(tmp_path: Path) -> None:
    bench = f"""
import sys
sys.modules["matplotlib"] = None
from outpace.cli import cli
cli(["bench", "--model", "absent", "--out", {str(tmp_path)!r}])
"""
    done = _python(bench)
    assert done.returncode == 2
    assert "plots need matplotlib: pip install 'outpace[bench]'" in done.stderr
    assert "Traceback" not in done.stderr
    shown = _python(
        "import sys\nsys.modules['matplotlib'] = None\nfrom outpace.cli import cli\ncli(['--help'])"
    )
    assert shown.returncode == 0, shown.stderr


def test_57_nothing_of_transformers_is_replaced() -> None:
    """Compares every function and class attribute of the loaded modules, before and after."""
    snapshot = """
import sys
import transformers, transformers.cache_utils, transformers.masking_utils
import transformers.modeling_utils, transformers.generation.utils
from transformers.models.llama import modeling_llama

def snapshot():
    found = {}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] != "transformers":
            continue
        for key, value in list(vars(module).items()):
            if callable(value):
                found[name, key] = value
            if isinstance(value, type) and value.__module__ == name:
                found.update({(name, key, k): v for k, v in vars(value).items() if callable(v)})
    return found

def changed(before):
    after = snapshot()
    return sorted(str(key) for key in before if after.get(key) is not before[key])
"""
    run = """
from tiny import serve, shared
serve(shared("llama"), "lookahead").generate([1, 2, 3], max_new_tokens=8)
"""
    before = snapshot + "before = snapshot()\n"
    done = _python(before + IMPORT_ALL + run + "print(len(before), changed(before))")
    assert done.returncode == 0, done.stderr
    count, changed = done.stdout.split(maxsplit=1)
    assert int(count) > 1000
    assert changed.strip() == "[]"
    patch = "modeling_llama.LlamaModel.forward = lambda self: None\n"
    control = _python(before + patch + "print(changed(before))")
    assert "'LlamaModel', 'forward'" in control.stdout


def _python(script: str) -> subprocess.CompletedProcess[str]:
    tests = str(Path(__file__).parent)
    script = f"import sys; sys.path.append({tests!r})\n{script}"
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)


def _name(requirement: str) -> str:
    """The normalised name that a requirement or a pin starts with."""
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match is not None
    return re.sub("[-_.]+", "-", match[0]).lower()


def test_the_package_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "outpace", "--version"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert outpace.__version__ in shown
