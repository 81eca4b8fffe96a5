"""The pages: links lead somewhere, the index has them all, and what they name exists."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest

from jaxserve import LLM, SamplingParams
from jaxserve.llm.llm import ACCEPTED
from jaxserve.runtime.environment import DEFAULT_MODEL_NAME
from jaxserve.runtime.settings import SETTINGS
from tests.architecture.package_map import with_diagram
from tests.architecture.sources import ROOT, program

PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
REFERENCES = sorted(set(re.findall(r"`([a-z_]+(?:/[a-z_]+)+)\.((?:[A-Z]\w+\.)?[a-z_]\w+)`", PAGE)))

PAGES = [
    ROOT / name
    for pattern in ("*.md", "docs/**/*.md", "kernels/**/*.md", "benchmarks/**/*.md")
    for name in ROOT.glob(pattern)
]


def anchors(page: Path) -> set[str]:
    """Return the anchors of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text("utf-8")):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_the_index_has_every_page() -> None:
    index = ROOT / "docs" / "README.md"
    linked = {(index.parent / link).resolve() for link in re.findall(r"\]\(([^)#\s]+)", index.read_text("utf-8"))}
    pages = {page for page in (ROOT / "docs").rglob("*.md") if page.parent.name != "decisions"}
    assert pages - linked == {index}


def test_snippets_ask_for_models_that_exist() -> None:
    for page in PAGES:
        text = page.read_text("utf-8")
        modules = ",".join(re.findall(r"--lora-modules (\S+)", text))
        named = [*modules.split(","), *re.findall(r"--model (\w+=)", text)]
        served = {DEFAULT_MODEL_NAME, *(module.partition("=")[0] for module in named)}
        for block in re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S):
            for name in re.findall(r'\bmodel="([^"]+)"', block):
                assert name in served or "/" in name, f"{page}: {name}"


def test_snippets_call_what_there_is_by_the_names_that_it_has() -> None:
    """A keyword of the Python API that does not exist would fail for a reader who pastes the snippet."""
    methods = {name: set(inspect.signature(found).parameters) for name, found in vars(LLM).items() if callable(found)}
    known = {"LLM": set(ACCEPTED), "SamplingParams": set(SamplingParams.__dataclass_fields__), **methods}
    checked = 0
    for page in PAGES:
        for block in re.findall(r"^```python\n(.*?)^```$", page.read_text("utf-8"), re.M | re.S):
            if "from jaxserve import" not in block:
                continue
            for call in (node for node in ast.walk(ast.parse(block)) if isinstance(node, ast.Call)):
                name = call.func.attr if isinstance(call.func, ast.Attribute) else ast.unparse(call.func)
                words = {keyword.arg for keyword in call.keywords}
                assert name == "print" or words <= known[name], f"{page}: {ast.unparse(call)}"
                checked += 1
    assert checked > 10


def test_the_example_of_a_family_is_its_file() -> None:
    page = (ROOT / "docs" / "adding_a_model.md").read_text("utf-8")
    (shown,) = re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)
    (path,) = re.findall(r"whole family, `([^`]+)`", page)
    assert shown == (ROOT / path).read_text("utf-8")


def test_features_of_decoders_are_fields_and_files_that_exist() -> None:
    page = (ROOT / "docs" / "adding_a_model.md").read_text("utf-8")
    part = page.partition("\n## 2. ")[2].partition("\n## ")[0]
    modules = [source.tree for source in program() if source.module.startswith("jaxserve.model_config.")]
    classes = {node.name: node for tree in modules for node in tree.body if isinstance(node, ast.ClassDef)}
    known = set(classes) | {
        f"{name}.{field.target.id}"
        for name, node in classes.items()
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    }
    rows = [row.split("|") for row in re.findall(r"^\| .*`.*$", part, re.M)]
    named = {name for row in rows for name in re.findall(r"`([^`]+)`", row[2])}
    qualified = {name if "." in name or name in classes else f"DecoderConfig.{name}" for name in named}
    assert len(qualified) > 60
    assert sorted(qualified - known) == []
    files = {name for row in rows for name in re.findall(r"`(\w+\.py)`", row[3])}
    assert [name for name in sorted(files) if not (ROOT / "jaxserve/models/families" / name).is_file()] == []


def test_flags_named_for_those_of_vllm_exist() -> None:
    page = (ROOT / "docs" / "differences.md").read_text("utf-8")
    rows = re.findall(r"^\| `--[^|]* \| ([^|]*) \|$", page.partition("## The flags of `vllm serve`")[2], re.M)
    named = {flag for row in rows for flag in re.findall(r"`(--[a-z-]+)", row)}
    known = {setting.flag for setting in SETTINGS} | {f"--no-{s.flag[2:]}" for s in SETTINGS if s.kind == "switch"}
    assert len(named) >= 5
    assert named <= known


def test_the_trace_names_functions() -> None:
    assert len(REFERENCES) >= 8


@pytest.mark.parametrize(("file", "name"), REFERENCES, ids=lambda part: part)
def test_function_of_the_trace_exists(file: str, name: str) -> None:
    if name == "py":
        assert any((root / f"{file}.py").exists() for root in (ROOT, ROOT / "jaxserve"))
        return
    (source,) = [source for source in program() if source.module == "jaxserve." + file.replace("/", ".")]
    body: list[ast.stmt] = source.tree.body
    for part in name.split("."):
        (found,) = [
            node
            for node in body
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name == part
        ]
        body = found.body


def test_every_package_is_described() -> None:
    packages = {source.module.split(".")[1] for source in program() if source.module.startswith("jaxserve.")}
    described = PAGE.split("## Packages")[1].split("```")[1]
    assert [name for name in sorted(packages) if not re.search(rf"\b{name}\b", described)] == []


def test_the_diagram_of_packages_is_fresh() -> None:
    assert with_diagram(PAGE) == PAGE, "run `make docs`"


def test_the_trace_has_at_most_twelve_steps() -> None:
    trace = PAGE.split("## One chat request")[1].split("\n\n")[1]
    assert 3 <= len(trace.splitlines()) - 2 <= 12


def test_paths_of_the_start_here_table_exist() -> None:
    table = PAGE.split("## To change X")[1].split("\n## ")[0]
    paths = re.findall(r"`([a-z_]+/[a-z_/]*(?:\.py)?)`", table)
    assert len(paths) > 20
    assert [path for path in paths if not ((ROOT / "jaxserve" / path).exists() or (ROOT / path).exists())] == []


def test_readme_lists_every_architecture_that_is_served() -> None:
    families = [source for source in program() if source.module.startswith("jaxserve.models.families.")]
    served = {name for source in families for name in re.findall(r'"(\w+For\w+)"', source.path.read_text("utf-8"))}
    assert set(re.findall(r"`(\w+For\w+)`", (ROOT / "README.md").read_text("utf-8"))) == served
