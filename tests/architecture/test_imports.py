"""Allowed imports between packages, and access to jax, flax and the environment."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys

from tests.architecture.sources import ROOT, Source, program

SHARED = {
    "jaxserve",
    "jaxserve.bounds",
    "jaxserve.config",
    "jaxserve.errors",
    "jaxserve.foreign_settings",
    "jaxserve.log",
    "jaxserve.metrics",
    "jaxserve.parent",
    "jaxserve.tenants",
    "jaxserve.types",
    "jaxserve.yaml_values",
}
KERNELS = "jaxserve_kernels"

# A package may import itself, SHARED, and the packages or single modules listed here.
MAY_IMPORT: dict[str, set[str]] = {
    "cli": {
        "tools",
        "runtime",
        "flight.record",
        "flight.replay",
        "http.app",  # the reference page of the API
        "http.openapi",
        "http.schema_words",
        "apis.routes",
        "apis.schema",
        "executor.precompile",
        "executor.convert",
        "checkpoint",
        "sampling.params",
    },
    "ray": {
        "cli.main",  # the server of a replica is the command
        "runtime",
        "http",
        "apis",
        "frontend",
        "tokenizer",
        "routing",
        "checkpoint",
    },
    "runtime": {
        "http",
        "apis",
        "frontend",
        "tokenizer",
        "ipc",
        "checkpoint",
        "routing",
        "runner.host.memory",  # the free memory of the host
        "runner.host.cgroup",  # processes killed for lack of memory
    },
    "": {"llm"},  # the package itself: its public names, imported when they are asked for
    "llm": {
        "runtime",
        "frontend",
        "tokenizer",
        "ipc",
        "sampling.params",
        "checkpoint",
        "scheduler.admission",
    },
    "tools": {
        "model_config",
        "runner",  # planning sizes and compiles the programs
        "models",
        "layers.cache",  # the shapes of the cache
        "layers.expert_parallel",  # the rule for all-to-all
        "layers.policy",
        "quant",
        "sharding",
        "checkpoint",
        "kv.spec",
        "scheduler.plan",
        "tokenizer",
        "engine",  # `bench offline` runs an EngineCore
        "executor.adapters",  # the places that adapters take
        "executor.embedding",  # the sizes of an engine that embeds
        "executor.preparation",  # its task
        "runtime",
        "frontend.constraints",
        "frontend.grammar",
        "ipc",
        "ipc.stats",
        "sampling.params",
    },
    "http": {"apis", "frontend", "ipc", "sampling.params"},
    "apis": {"frontend", "tokenizer", "ipc", "sampling.params"},
    "frontend": {
        "tokenizer",
        "ipc",
        "sampling.params",
        "forkserver",
        "structured.protocol",
        "routing",
        "model_config.preprocessing",  # sizes and markup of images and videos
        "checkpoint.image_processor",
        "checkpoint.preprocessing.videos",
        "checkpoint.source",  # the path of an image encoder
    },
    "tokenizer": {"checkpoint"},
    "ipc": {"sampling.params"},
    "engine": {
        "flight",
        "scheduler",
        "kv",
        "executor",
        "ipc",
        "sampling.params",
        "structured",
        "checkpoint.source",  # the path of a draft model
        "checkpoint.drafters.form",  # a drafter that is no model has no tokenizer to compare
        "tokenizer",  # a draft model needs the same one
    },
    "flight": {"scheduler", "kv", "ipc.messages", "sampling.params"},
    "structured": {"forkserver", "tokenizer", "ipc.call_grammar", "ipc.messages", "sampling.bits"},
    "forkserver": set(),
    "scheduler": {
        "kv",
        "sampling.params",
        "ipc.image_info",
        "ipc.messages",
        "ipc.prompt_embeds",
        "ipc.prompt_images",
        "ipc.routed_experts",
        "ipc.stats",
    },
    "kv": set(),
    "routing": {"kv.block_table"},  # HashChain
    "executor": {
        "runner",
        "model_config",
        "models",
        "weights",
        "sharding",
        "checkpoint",
        "sampling",
        "layers.cache",  # the shapes of the cache
        "layers.policy",
        "quant.array",
        "quant.kv_scales",  # the names of scales
        KERNELS,  # the names of backends
        "ipc.engine_spec",  # FakeOptions
        "ipc.image_info",
        "ipc.messages",
        "ipc.prompt_embeds",
        "ipc.report",
        "ipc.routed_experts",
        "ipc.stats",
        "scheduler.plan",
        "kv.spec",
        "kv.tiers.device",
        "kv.tiers.page",
    },
    "runner": {
        "model_config",
        "models",
        "layers",
        "quant",
        "sampling",
        "sharding",
        "weights",
        "kv.spec",
        "kv.tiers.page",
        "scheduler.plan",
        "checkpoint",  # tensors of image encoders
        KERNELS,
    },
    "models": {"model_config", "layers", "quant", "sharding", "checkpoint", KERNELS},
    "layers": {"model_config", "quant", "sharding", KERNELS},
    "weights": {"model_config", "models", "layers", "quant", "sharding", "checkpoint"},
    "sampling": {KERNELS},  # sums of rows
    "sharding": {"model_config"},
    "model_config": set(),
    "metrics": {"ipc.messages", "ipc.stats"},
    "checkpoint": {"model_config", "quant"},
    "quant": {"model_config", KERNELS},
    "bounds": set(),
    "config": set(),
    "errors": set(),
    "foreign_settings": set(),
    "types": set(),
    "log": set(),
    "parent": set(),
    "tenants": set(),
    "yaml_values": set(),
}

NO_JAX = [
    "jaxserve.bounds",
    "jaxserve.config",
    "jaxserve.errors",
    "jaxserve.foreign_settings",
    "jaxserve.types",
    "jaxserve.log",
    "jaxserve.metrics",
    "jaxserve.parent",
    "jaxserve.yaml_values",
    "jaxserve.cli",
    "jaxserve.llm",
    "jaxserve.runtime",
    "jaxserve.tools.bench",
    "jaxserve.tools.client",
    "jaxserve.tools.terminal",
    "jaxserve.http",
    "jaxserve.apis",
    "jaxserve.frontend",
    "jaxserve.forkserver",
    "jaxserve.tokenizer",
    "jaxserve.ipc",
    "jaxserve.flight",
    "jaxserve.scheduler",
    "jaxserve.kv",
    "jaxserve.routing",
    "jaxserve.checkpoint",
    "jaxserve.structured",
    "jaxserve.sampling.params",
    "jaxserve.model_config",
    "jaxserve.models.registry",
    "jaxserve.models.families",
]
READ_ENVIRONMENT = (
    "jaxserve.runtime.environment",
    "jaxserve.runner.host.cores",  # the variable from which XLA reads the number of its threads
    "jaxserve.runner.program_key",  # the flags that XLA itself reads are part of a program's key
)
JAX_FAMILY = {"jax", "jaxlib", "flax", "orbax", "optax", KERNELS}


def package_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def within(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


def wrong_imports(source: Source) -> list[str]:
    """Imports of `source` that the table does not allow, as `file:line imports module`."""
    package = package_of(source.module)
    allowed = {name if name == KERNELS else f"jaxserve.{name}" for name in {package, *MAY_IMPORT.get(package, set())}}
    return [
        f"{source.place}:{line} imports {module}"
        for line, module in source.imports()
        if within(module, "jaxserve", KERNELS)
        and module not in SHARED
        and not within(module, "jaxserve.config", *allowed)
    ]


def test_every_package_is_in_the_table() -> None:
    packages = {package_of(source.module) for source in program() if within(source.module, "jaxserve")} - {""}
    assert packages - MAY_IMPORT.keys() == set()


def test_packages_import_only_what_the_table_allows() -> None:
    inner = [source for source in program() if within(source.module, "jaxserve")]
    assert [fault for source in inner for fault in wrong_imports(source)] == []


def test_the_table_has_no_cycle_between_packages() -> None:
    """Plain data modules (`scheduler.plan`) may be shared downwards; whole packages may not."""
    above = {
        package: {name for name in uses if "." not in name} & MAY_IMPORT.keys() for package, uses in MAY_IMPORT.items()
    }
    while above:
        free = {package for package, uses in above.items() if not uses}
        assert free, f"cycle among {sorted(above)}"
        above = {package: uses - free for package, uses in above.items() if package not in free}


def test_no_package_imports_the_command_line() -> None:
    assert [package for package, uses in MAY_IMPORT.items() if "cli" in uses] == []


def test_kernels_never_import_the_server() -> None:
    kernels = [source for source in program() if within(source.module, KERNELS)]
    assert [
        f"{source.place}:{line}"
        for source in kernels
        for line, module in source.imports()
        if within(module, "jaxserve", "flax")
    ] == []


def test_packages_without_devices_do_not_import_jax() -> None:
    assert [
        f"{source.place}:{line} imports {module}"
        for source in program()
        if within(source.module, *NO_JAX)
        for line, module in source.imports()
        if module.split(".")[0] in JAX_FAMILY
    ] == []


def test_flax_is_imported_only_by_models_layers_and_weights() -> None:
    assert [
        f"{source.place}:{line}"
        for source in program()
        if not within(source.module, "jaxserve.models", "jaxserve.layers", "jaxserve.weights")
        for line, module in source.imports()
        if within(module, "flax")
    ] == []


def test_jit_stands_only_in_runner_steps() -> None:
    """Pallas kernels are the exception: programs call them once per layer and lower them once."""
    kernel = re.compile(rf"{KERNELS}\.\w+\.(gpu|tpu)\.\w+")
    places = {source.module for source in program() if kernel.fullmatch(source.module)} | {"jaxserve.runner.steps"}
    jits = {"jax.jit", "jax.pmap", "nnx.jit"}
    faults = [
        f"{source.place}:{line} {name}"
        for source in program()
        if source.module not in places
        for line, name in source.dotted_names()
        if name in jits
    ]
    faults += [
        f"{source.place} imports jit"
        for source in program()
        if any("from jax import" in line and "jit" in line for line in source.text.splitlines())
    ]
    assert faults == []


def test_environment_is_read_only_by_the_options() -> None:
    reads = ("os.environ", "os.getenv", "os.putenv")
    assert [
        f"{source.place}:{line} {name}"
        for source in program()
        if source.module not in READ_ENVIRONMENT
        for line, name in source.dotted_names()
        if name in reads
    ] == []


def test_api_process_leaves_jax_and_transformers_unimported() -> None:
    """One interpreter imports them one after the other, and names the first that brings such a package."""
    modules = ("http.app", "runtime.server", "cli.bench", "cli.plan", "cli.replay", "llm.llm")
    script = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(f'jaxserve.{name}')\n"
        "    if found := {'jax', 'jaxlib', 'flax', 'transformers', 'torch'} & set(sys.modules):\n"
        "        sys.exit(f'jaxserve.{name} imports {sorted(found)}')\n"
    )
    environment = {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-c", script, *modules]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_quantisation_formats_leave_jax_unimported() -> None:
    """Checkpoints are opened and formats listed in processes without jax. `block_kinds` and `tpu_words` are numpy and plain data."""
    script = (
        "import sys, jaxserve.quant.registry as registry, jaxserve.quant.names as names; "
        "[registry.find_format(name) for name in names.format_names()]; registry.read_form({}); "
        "plain = {'jaxserve_kernels.block_kinds', 'jaxserve_kernels.tpu_words'}; "
        "kernels = {name for name in sys.modules if name.startswith('jaxserve_kernels.')} - plain; "
        "sys.exit(', '.join(kernels | {'jax', 'jaxlib', 'flax'} & set(sys.modules)) or 0)"
    )
    environment = {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_checks_see_a_forbidden_import() -> None:
    """The table is worth nothing if the parser misses imports inside functions or relative ones."""
    path = ROOT / "jaxserve" / "http" / "example.py"
    code = "def late():\n    from jaxserve.engine import core\n    from ..runner import steps\n    import jaxserve.kv.spec\n"
    source = Source("jaxserve.http.example", path, code)
    assert [fault.rpartition(" ")[2] for fault in wrong_imports(source)] == [
        "jaxserve.engine.core" if importlib.util.find_spec("jaxserve.engine.core") else "jaxserve.engine",
        "jaxserve.runner.steps" if importlib.util.find_spec("jaxserve.runner.steps") else "jaxserve.runner",
        "jaxserve.kv.spec",
    ]
