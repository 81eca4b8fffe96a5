"""A sampling option is a field and a function, stateless or stateful: served, checked, documented, in the Python API."""

from __future__ import annotations

import json
from typing import Any

import pytest

from jaxserve.tokenizer.tokenizer import load_tokenizer
from tests.additions.overlay import Overlay, unnamed
from tests.e2e.http_server import Server, await_ready, launched
from tests.e2e.real_server import COLD_START_TIMEOUT_S, FEW_PROGRAMS
from tests.models.goldens import golden_checkpoint
from tests.programs import shared_programs

pytestmark = pytest.mark.slow

CUT_FIELD = """    top_n_sigma: Annotated[
        float,
        Meta(ge=0.0, le=10.0, description="Keep logits within n standard deviations of the largest; 0 keeps all."),
        Option("cuts"),
    ] = 0.0"""
CUT = '''def top_n_sigma(rows: Candidates, value: Float[Array, "B"]) -> Float[Array, "B"]:
    """Return the largest logit less n standard deviations (arXiv 2411.07641)."""
    return jnp.where(value > 0, rows.largest[:, 0] - value * rows.logits.std(-1), -jnp.inf)


'''
STATE_FIELD = """    successor_bias: Annotated[
        float,
        Meta(ge=-100.0, le=100.0, description="Added to the logit of the id after the newest token's."),
        Option("penalties", keeps_state=True),
    ] = 0.0"""
STATE = '''_NEWEST = StateField("newest", (), lambda init, _: init.token_ids[-1], after_token=lambda _, token: token)


@stateful(_NEWEST)
def successor_bias(
    logits: Float[Array, "B V"], value: Float[Array, "B"], newest: Int[Array, "B"]
) -> Float[Array, "B V"]:
    """Add `value` to the logit of the id after the newest token's."""
    return logits + value[:, None] * (jnp.arange(logits.shape[1]) == newest[:, None] + 1)


'''
PYTHON_API = """
import sys
from jaxserve import LLM, SamplingParams
params = SamplingParams(successor_bias=100, top_n_sigma=0.5, max_tokens=4, ignore_eos=True)
with LLM(sys.argv[1], max_num_seqs=1, max_num_batched_tokens=16, compile_cache=sys.argv[2], cpu_kernels="xla") as llm:
    print(llm.generate([5], params)[0].outputs[0].token_ids)
"""


@pytest.fixture
def extended(overlay: Overlay) -> Overlay:
    overlay.insert("jaxserve/sampling/params.py", CUT_FIELD, before="    seed: Annotated[")
    overlay.insert("jaxserve/sampling/cuts.py", CUT, before="def _smallest_with(")
    overlay.insert("jaxserve/sampling/params.py", STATE_FIELD, before="    min_tokens: Annotated[")
    overlay.insert("jaxserve/sampling/penalties.py", STATE, before="_GENERATED: Final")
    return overlay


def tokens(server: Server, **options: Any) -> list[str]:
    """Return ten generated tokens."""
    body = {"model": "new", "prompt": [5], "max_tokens": 10, "ignore_eos": True, "logprobs": 0} | options
    status, _, reply = server.request("POST", "/v1/completions", body)
    assert status == 200, reply
    generated: list[str] = json.loads(reply)["choices"][0]["logprobs"]["tokens"]
    return generated


def test_an_option_of_either_kind_is_a_field_and_a_function(extended: Overlay) -> None:
    assert unnamed(extended, "a sampling option") == set()
    path = golden_checkpoint("llama3_tiny").path
    tokenizer = load_tokenizer(path)
    command = [*extended.python, "-m", "jaxserve.cli.main", "serve", str(path), "--served-model-name", "new"]
    command += [*FEW_PROGRAMS, "--port", "0", "--compile-cache", str(shared_programs()), "--cpu-kernels", "xla"]
    with launched(command, extended.root, extended.python_path) as server:
        await_ready(server, COLD_START_TIMEOUT_S)
        greedy, drawn = tokens(server, temperature=0), [tokens(server, seed=seed) for seed in range(3)]
        assert greedy not in drawn
        assert [tokens(server, seed=seed, top_n_sigma=1e-4) for seed in range(3)] == [greedy] * 3
        assert tokens(server, seed=0, top_n_sigma=0) == drawn[0]
        assert tokens(server, temperature=0, successor_bias=100) == [
            tokenizer.token_text(token) for token in range(6, 16)
        ]
        assert tokens(server, temperature=0, frequency_penalty=1e-6) == greedy
        for name, value in (("top_n_sigma", 10.5), ("successor_bias", -101)):
            status, _, reply = server.request("POST", "/v1/completions", {"model": "new", "prompt": "x", name: value})
            error = json.loads(reply)["error"]
            assert (status, error["param"]) == (400, name)
            assert str(value) in error["message"]


def test_an_option_is_documented(extended: Overlay) -> None:
    extended.run("-m", "jaxserve.cli.internal.reference", "docs/reference")
    for page, count in (("sampling.md", 1), ("api.md", 4)):
        text = (extended.root / "docs" / page).read_text("utf-8")
        assert text.count("| `top_n_sigma` | number | 0 to 10 | Keep logits within n") == count
        assert text.count("| `successor_bias` | number | -100 to 100 | Added to the logit of the id after") == count


def test_an_option_is_one_of_the_python_api(extended: Overlay) -> None:
    model = golden_checkpoint("llama3_tiny").path
    assert "[6, 7, 8, 9]" in extended.run("-c", PYTHON_API, str(model), str(shared_programs()))


@pytest.mark.parametrize(
    ("field", "module", "function", "error"),
    [
        (CUT_FIELD, "cuts", "", "'top_n_sigma': jaxserve.sampling.cuts has no function of this name"),
        (STATE_FIELD, "penalties", "successor_bias = max\n", "differ on whether it keeps state"),
    ],
)
def test_half_an_option_is_refused(overlay: Overlay, field: str, module: str, function: str, error: str) -> None:
    overlay.insert("jaxserve/sampling/params.py", field, before="    seed: Annotated[")
    overlay.insert(f"jaxserve/sampling/{module}.py", function, before="import jax.numpy as jnp")
    with pytest.raises(AssertionError, match=error):
        overlay.run("-c", "import jaxserve.sampling.sampler")
